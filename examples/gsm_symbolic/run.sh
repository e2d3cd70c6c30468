#!/usr/bin/env bash
# Trains on the endless problems of reasoning-gym's gsm_symbolic, graded by its verifier (pip install reasoning-gym).
#
#   bash examples/gsm_symbolic/run.sh --cpu [options of train.py …]                   a tiny random model, a minute
#   bash examples/gsm_symbolic/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/gsm_symbolic/config.yaml, which holds the recipe. --outputs-dir DIR takes the
# place of outputs/, and --run-name NAME that of gsm-symbolic.
set -euo pipefail

readonly NAME=gsm_symbolic
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

files() { FILES=(--prompt-data "$data/train.jsonl" --eval-prompt-data held_out "$data/eval.jsonl"); }
example "$@"
