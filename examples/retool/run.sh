#!/usr/bin/env bash
# A model learns to run code rather than to guess; then shows what it learned.
#
#   bash examples/retool/run.sh --cpu [options of train.py …]                   a tiny random model, some minutes
#   bash examples/retool/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/retool/config.yaml, which holds the recipe. --outputs-dir DIR takes the place of
# outputs/, and --run-name NAME that of retool.
set -euo pipefail

readonly NAME=retool
source "$(dirname "${BASH_SOURCE[0]}")/../tool_example.sh"

options "$@"
make_task
warm_up
train "$run_name"
echo
report "$outputs/$run_name"
