#!/usr/bin/env bash
# Shows how far engine and trainer are apart, and what truncated importance sampling (TIS) makes of it. Three runs:
# with an engine in float32 as the trainer, in bfloat16, and in bfloat16 with TIS.
#
#   bash examples/train_infer_mismatch/run.sh --cpu [options of train.py …]                  a tiny random model, a minute
#   bash examples/train_infer_mismatch/run.sh --hf-checkpoint DIR [options of train.py …]    a model of yours, on GPUs
#
#   RUNS="bfloat16-tis"    which of the runs float32, bfloat16 and bfloat16-tis
#
# Options of train.py win over examples/train_infer_mismatch/config.yaml, which holds the recipe. --outputs-dir DIR
# takes the place of outputs/, and --run-name NAME that of mismatch, with which the runs' names begin.
set -euo pipefail

readonly NAME=train_infer_mismatch
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

options --run-name mismatch "$@"
make_task
run_dirs=()
for run in ${RUNS:-float32 bfloat16 bfloat16-tis}; do
    case $run in
        float32 | bfloat16) train "$run_name-$run" --sglang-dtype "$run" ;;
        bfloat16-tis) train "$run_name-$run" --sglang-dtype bfloat16 --use-tis ;;
        *) fail "RUNS: there is no run $run" ;;
    esac
    run_dirs+=("$outputs/$run_name-$run")
done
echo
"$PYTHON" -m examples.train_infer_mismatch.report "${run_dirs[@]}"
