#!/usr/bin/env bash
# Trains a real 135M model to find the largest of three numbers, on a CPU, in minutes; then shows what it learned.
#
#   bash scripts/quickstart.sh [--seed N] [--continue] [options of train.py …]
#
#   --seed N      another run: the order of the prompts, and what is sampled (default: 1)
#   --continue    go on from the last checkpoint of outputs/quickstart; give a larger --num-rollout with it
#
# Any other option goes to train.py and wins over examples/quickstart/config.yaml, which holds the recipe.
# An earlier outputs/quickstart is kept, as outputs/quickstart-1, -2, …
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PYTHON=.venv/bin/python
readonly DATA=outputs/quickstart-data
export HF_HUB_OFFLINE=1

main() {
    local seed=1 resume=false run_name=quickstart checkpoint="" dry=false passed=()
    while (($#)); do
        case $1 in
            -h | --help) usage && return ;;
            --continue) resume=true ;;
            --seed | --run-name | --hf-checkpoint)
                (($# > 1)) || fail "$1 needs a value"
                case $1 in
                    --seed) seed=$2 ;;
                    --run-name) run_name=$2 ;;
                    --hf-checkpoint) checkpoint=$2 ;;
                esac
                shift
                ;;
            --seed=*) seed=${1#*=} ;;
            --run-name=*) run_name=${1#*=} ;;
            --hf-checkpoint=*) checkpoint=${1#*=} ;;
            --outputs-dir | --outputs-dir=*) fail "$1: the quick start's outputs are in outputs/; use --run-name" ;;
            --dry-run) dry=true && passed+=("$1") ;;
            *) passed+=("$1") ;;
        esac
        shift
    done
    local run_dir=outputs/$run_name

    bash scripts/setup.sh
    [[ -n $checkpoint ]] || checkpoint=$("$PYTHON" scripts/fetch_smollm2.py)
    say "writing the task: the largest of three numbers"
    "$PYTHON" examples/quickstart/make_task.py --output "$DATA"
    if [[ $resume == true ]]; then
        [[ -d $run_dir/checkpoints ]] || fail "there is no checkpoint in $run_dir: run this without --continue first"
        passed+=(--load "$run_dir/checkpoints")
    elif [[ $dry == false ]]; then
        move_aside "$run_dir"
    fi

    local command=("$PYTHON" train.py --config examples/quickstart/config.yaml --run-name "$run_name"
        --hf-checkpoint "$checkpoint" --seed "$seed" --rollout-seed "$seed" ${passed[@]+"${passed[@]}"})
    say "running: ${command[*]}"
    "${command[@]}" || fail "train.py ended with the status $?: the reason is above, all logs are in $run_dir"
    [[ $dry == true ]] || { echo && "$PYTHON" -m examples.quickstart.report "$run_dir"; }
}

# Keeps an earlier run under the first number that is free.
move_aside() {
    [[ -e $1 ]] || return 0
    local number=1
    while [[ -e $1-$number ]]; do number=$((number + 1)); done
    mv "$1" "$1-$number"
    say "the earlier run is now $1-$number"
}

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }
say() { echo "[quick start] $*"; }
fail() { echo "[quick start] error: $*" >&2; exit 1; }

main "$@"
