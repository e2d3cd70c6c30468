#!/usr/bin/env bash
# A solver and a critic that share the policy are trained together; then shows how often each was right.
#
#   bash examples/multi_agent/run.sh --cpu [options of train.py …]                   a tiny model, a minute or two
#   bash examples/multi_agent/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/multi_agent/config.yaml, which holds the recipe. --outputs-dir DIR takes the
# place of outputs/, and --run-name NAME that of multi-agent.
set -euo pipefail

readonly NAME=multi_agent
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

example "$@"
