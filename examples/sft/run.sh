#!/usr/bin/env bash
# Supervised fine-tuning on conversations; then the engine is asked, and shows what it learned to say.
#
#   bash examples/sft/run.sh --cpu [options of train.py …]                   a tiny random model, half a minute
#   bash examples/sft/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/sft/config.yaml, which holds the recipe. --outputs-dir DIR takes the place of
# outputs/, and --run-name NAME that of sft.
set -euo pipefail

readonly NAME=sft
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

files() { FILES=(--prompt-data "$data/train.jsonl" --eval-prompt-data said "$data/eval.jsonl"); }
example "$@"
