#!/usr/bin/env bash
# Fully asynchronous: groups are generated all the time; then shows what was learned, how old the trained tokens were,
# and how well generation and training overlapped.
#
#   bash examples/fully_async/run.sh --cpu [options of train_async.py …]                 a tiny random model, a minute
#   bash examples/fully_async/run.sh --hf-checkpoint DIR [options of train_async.py …]   a model of yours, on GPUs
#
# Options of train_async.py win over examples/fully_async/config.yaml. --outputs-dir DIR takes the place of outputs/,
# and --run-name NAME that of fully-async.
set -euo pipefail

readonly NAME=fully_async
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
readonly ENTRY=train_async.py

report() {
    "$PYTHON" -m examples.reports "$1" "mean reward=rollout/raw_reward" "mean age of a token=staleness/mean" \
        "oldest token=staleness/max" "versions in a sample=staleness/spans_per_sample" \
        "overlap efficiency=perf/overlap_efficiency" "the trainer waited, share=perf/trainer_idle_ratio"
}

example "$@"
