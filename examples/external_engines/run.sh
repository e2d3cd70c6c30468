#!/usr/bin/env bash
# Trains against engines that it has started before, adds one while the run goes on and takes one away; then shows how
# fast responses came from how many engines, and that no sample is lost.
#
#   bash examples/external_engines/run.sh --cpu [options of train.py …]                   a tiny random model
#   bash examples/external_engines/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours
#
# Options of train.py win over examples/external_engines/config.yaml, which holds the recipe. --outputs-dir DIR takes the
# place of outputs/, and --run-name NAME that of external-engines.
set -euo pipefail

readonly NAME=external_engines
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

main() {
    options "$@"
    make_task
    LAUNCH=("$PYTHON" -m examples.external_engines.engines "${checkpoint:-$data/tiny}" "$data/engines.txt" "$outputs/$run_name")
    train "$run_name" --rollout-external-engine-addrs "@$data/engines.txt"
    echo
    report "$outputs/$run_name"
}
main "$@"
