#!/usr/bin/env bash
# A model learns to search rather than to guess; then shows what it learned. A search server runs meanwhile.
#
#   bash examples/search_r1/run.sh --cpu [options of train.py …]                   a tiny random model, some minutes
#   bash examples/search_r1/run.sh --hf-checkpoint DIR [options of train.py …]     a model of yours, on GPUs
#
# Options of train.py win over examples/search_r1/config.yaml, which holds the recipe. --outputs-dir DIR takes the place
# of outputs/, and --run-name NAME that of search-r1.
set -euo pipefail

readonly NAME=search_r1
source "$(dirname "${BASH_SOURCE[0]}")/../tool_example.sh"

# Serves the corpus on a free port of loopback, until this script ends; writes its address for generate.py.
start_search() {
    local said=$data/search.log
    "$PYTHON" -m colloid.agents.search --corpus "$data/corpus.jsonl" --port 0 >"$said" 2>&1 &
    readonly SERVER=$!
    trap 'kill "$SERVER" 2>/dev/null || true' EXIT
    until grep -q retrieve "$said"; do
        kill -0 "$SERVER" 2>/dev/null || fail "the search server ended: $(cat "$said")"
        sleep 0.2
    done
    cat "$said"
    printf 'search_url: %s\nsearch_topk: 1\n' "$(grep -o 'http://[^ ]*' "$said")" >"$data/search.yaml"
}

files() { FILES=(--prompt-data "$data/train.jsonl" --custom-config-path "$data/search.yaml"); }

options "$@"
make_task
warm_up
start_search
train "$run_name"
echo
report "$outputs/$run_name"
