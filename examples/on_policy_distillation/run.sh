#!/usr/bin/env bash
# Distils a tiny teacher into a tiny student on the student's own samples, on a CPU, in a minute or two.
#
#   bash examples/on_policy_distillation/run.sh --cpu [options of train.py …]
#
#   --outputs-dir DIR    in place of outputs/
#   --run-name NAME      in place of distillation
#   --teacher-hidden N   the teacher's width (the student's is 64)
#
# Any other option goes to train.py and wins over examples/on_policy_distillation/config.yaml, which holds the recipe.
# For models of your own there is the command in README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly PYTHON=${PYTHON:-.venv/bin/python}
export HF_HUB_OFFLINE=1

main() {
    local outputs=outputs run_name=distillation task=() passed=()
    while (($#)); do
        case $1 in
            -h | --help) usage && return ;;
            --cpu) ;;
            --outputs-dir | --run-name | --teacher-hidden)
                (($# > 1)) || fail "$1 needs a value"
                case $1 in
                    --outputs-dir) outputs=$2 ;;
                    --run-name) run_name=$2 ;;
                    --teacher-hidden) task=("$1" "$2") ;;
                esac
                shift
                ;;
            *) passed+=("$1") ;;
        esac
        shift
    done
    local data=$outputs/distillation-data
    "$PYTHON" -m examples.on_policy_distillation.make_task --output "$data" ${task[@]+"${task[@]}"}

    local command=("$PYTHON" train.py --config examples/on_policy_distillation/config.yaml --device cpu
        --hf-checkpoint "$data/student" --opd-teacher-load "$data/teacher" --prompt-data "$data/prompts.jsonl"
        --outputs-dir "$outputs" --run-name "$run_name" ${passed[@]+"${passed[@]}"})
    echo "running: ${command[*]}"
    "${command[@]}" || fail "train.py ended with the status $?: the reason is above, all logs are in $outputs/$run_name"
    echo && "$PYTHON" -m examples.on_policy_distillation.report "$outputs/$run_name"
}

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }
fail() { echo "error: $*" >&2; exit 1; }

main "$@"
