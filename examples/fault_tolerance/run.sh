#!/usr/bin/env bash
# A run that nothing happens to, and the same run with an engine, the router and a trainer rank killed while it goes on;
# then shows that both are the same run, and how long each recovery took.
#
#   bash examples/fault_tolerance/run.sh --cpu [options of train.py …]                   a tiny random model
#   bash examples/fault_tolerance/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/fault_tolerance/config.yaml, which holds the recipe. --outputs-dir DIR takes the
# place of outputs/, and --run-name NAME that of fault-tolerance.
set -euo pipefail

readonly NAME=fault_tolerance
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

main() {
    options "$@"
    make_task
    train "$run_name-undisturbed"
    LAUNCH=("$PYTHON" -m examples.fault_tolerance.kill "$outputs/$run_name")
    train "$run_name"
    echo
    "$PYTHON" -m examples.fault_tolerance.report "$outputs/$run_name-undisturbed" "$outputs/$run_name"
}
main "$@"
