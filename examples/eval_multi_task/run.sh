#!/usr/bin/env bash
# Trains on one task and evaluates on four sets, each with its own sampling and grader; shows all of them.
#
#   bash examples/eval_multi_task/run.sh --cpu [options of train.py …]                   a tiny model, a minute
#   bash examples/eval_multi_task/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/eval_multi_task/config.yaml, which holds the recipe; the sets are in eval.yaml.
# --outputs-dir DIR takes the place of outputs/, and --run-name NAME that of eval-multi-task.
set -euo pipefail

readonly NAME=eval_multi_task
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

files() { FILES=(--prompt-data "$data/train.jsonl" --eval-config "$data/eval.yaml"); }
example "$@"
