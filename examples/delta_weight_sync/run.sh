#!/usr/bin/env bash
# Weights go to the engines as what changed, through files; then shows how much that was.
#
#   bash examples/delta_weight_sync/run.sh --cpu [options of train.py …]                   a tiny random model, half a minute
#   bash examples/delta_weight_sync/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Any other option goes to train.py and wins over examples/delta_weight_sync/config.yaml, which holds the recipe.
# --outputs-dir DIR takes the place of outputs/, and --run-name NAME that of delta-weight-sync.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly PYTHON=${PYTHON:-.venv/bin/python}
export HF_HUB_OFFLINE=1

main() {
    local outputs=outputs run_name=delta-weight-sync checkpoint="" tiny=() passed=()
    while (($#)); do
        case $1 in
            -h | --help) usage && return ;;
            --cpu) tiny=(--tiny) && passed+=(--device cpu) ;;
            --hf-checkpoint | --outputs-dir | --run-name)
                (($# > 1)) || fail "$1 needs a value"
                case $1 in
                    --hf-checkpoint) checkpoint=$2 ;;
                    --outputs-dir) outputs=$2 ;;
                    --run-name) run_name=$2 ;;
                esac
                shift
                ;;
            *) passed+=("$1") ;;
        esac
        shift
    done
    local data=$outputs/delta-weight-sync-data
    [[ -n $checkpoint || ${#tiny[@]} -gt 0 ]] || fail "give --cpu, or a model with --hf-checkpoint DIR"
    "$PYTHON" examples/delta_weight_sync/make_task.py --output "$data" ${tiny[@]+"${tiny[@]}"}

    local command=("$PYTHON" train.py --config examples/delta_weight_sync/config.yaml --hf-checkpoint "${checkpoint:-$data/tiny}"
        --prompt-data "$data/train.jsonl" --outputs-dir "$outputs" --run-name "$run_name" ${passed[@]+"${passed[@]}"})
    echo "running: ${command[*]}"
    "${command[@]}" || fail "train.py ended with the status $?: the reason is above, all logs are in $outputs/$run_name"
    echo && "$PYTHON" -m examples.delta_weight_sync.report "$outputs/$run_name"
}

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }
fail() { echo "error: $*" >&2; exit 1; }

main "$@"
