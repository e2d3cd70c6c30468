#!/usr/bin/env bash
# Asynchronous training that is the same run each time, whatever the wall clock does: one run, another one, and a third
# that goes on from a checkpoint of the first; then compares their metrics and their weights.
#
#   bash examples/reproducibility/run.sh --cpu [options of train_async.py …]                 a tiny random model
#   bash examples/reproducibility/run.sh --hf-checkpoint DIR [options of train_async.py …]   a model of yours, on GPUs
#
# Options of train_async.py win over examples/reproducibility/config.yaml. --outputs-dir DIR takes the place of
# outputs/, and --run-name NAME that of reproducibility.
set -euo pipefail

readonly NAME=reproducibility
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
readonly ENTRY=train_async.py

main() {
    options "$@"
    make_task
    train "$run_name-first"
    train "$run_name-again"
    train "$run_name-resumed" --load "$outputs/$run_name-first/checkpoints" --ckpt-step 1
    echo
    "$PYTHON" -m examples.reproducibility.compare "$outputs/$run_name"-{first,again,resumed}
}
main "$@"
