#!/usr/bin/env bash
# Weights go to the engines as what changed, through files; then shows how much that was.
#
#   bash examples/delta_weight_sync/run.sh --cpu [options of train.py …]                   a tiny random model, half a minute
#   bash examples/delta_weight_sync/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/delta_weight_sync/config.yaml, which holds the recipe. --outputs-dir DIR takes the
# place of outputs/, and --run-name NAME that of delta-weight-sync.
set -euo pipefail

readonly NAME=delta_weight_sync
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

example "$@"
