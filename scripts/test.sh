#!/usr/bin/env bash
# Sets up, then checks everything: ruff (lint and format), and all tests, the fast ones first.
#
#   bash scripts/test.sh             further arguments go to pytest (-x, -k NAME, …)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh || exit 1
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
readonly PYTHON=.venv/bin/python
readonly SESSION_SECONDS=3600
failed=()

# What an example needs, and no one else: a part of it is compiled, so it is not in the set-up of the quick start.
"$PYTHON" -m pip show -qq reasoning-gym 2>/dev/null ||
    "$PYTHON" -m pip install -qq --disable-pip-version-check -c .venv/constraints.txt -e ".[examples]" ||
    echo "[test] reasoning-gym could not be installed: the test of examples/gsm_symbolic is left out"

echo "[test] ruff check"
"$PYTHON" -m ruff check . || failed+=("ruff check")
echo "[test] ruff format --check"
"$PYTHON" -m ruff format --check . || failed+=("ruff format: run .venv/bin/ruff format .")
echo "[test] pytest"
"$PYTHON" -m pytest --session-timeout="$SESSION_SECONDS" tests/unit tests/engine tests/parallel tests/e2e "$@" ||
    failed+=("pytest")

if ((${#failed[@]})); then
    printf '[test] failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "[test] all passed"
