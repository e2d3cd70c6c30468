#!/usr/bin/env bash
# Agents around the clients of OpenAI and Anthropic are trained as they are; then shows what they came to.
#
#   bash examples/black_box_agent/run.sh --cpu [options of train.py …]                   a tiny model, a minute or two
#   bash examples/black_box_agent/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/black_box_agent/config.yaml, which holds the recipe. --outputs-dir DIR takes the
# place of outputs/, and --run-name NAME that of black-box-agent. Needs the packages openai and anthropic.
set -euo pipefail

readonly NAME=black_box_agent
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

example "$@"
