#!/usr/bin/env bash
# Trains a reward model on preferences, then a policy on its scores; shows the scores and some answers.
#
#   bash examples/custom_reward_model/run.sh --cpu [options of train.py …]                   tiny models, a minute or two
#   bash examples/custom_reward_model/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/custom_reward_model/config.yaml, which holds the recipe. --outputs-dir DIR takes
# the place of outputs/, and --run-name NAME that of custom-reward-model.
set -euo pipefail

readonly NAME=custom_reward_model
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

files() { FILES=(--prompt-data "$data/train.jsonl" --custom-rm-model-path "$data/reward-model"); }
example "$@"
