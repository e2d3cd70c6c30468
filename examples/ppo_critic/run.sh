#!/usr/bin/env bash
# PPO: a policy and a critic learn the same task from the same rollouts; then shows what both have learned.
#
#   bash examples/ppo_critic/run.sh --cpu [options of train.py …]                   a tiny random model, a minute or two
#   bash examples/ppo_critic/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/ppo_critic/config.yaml, which holds the recipe. --outputs-dir DIR takes the
# place of outputs/, and --run-name NAME that of ppo-critic.
set -euo pipefail

readonly NAME=ppo_critic
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

example "$@"
