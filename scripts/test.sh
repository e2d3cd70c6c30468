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

# Where options of pytest leave no test of a session, that is no failure.
run_tests() {
    "$PYTHON" -m pytest --session-timeout="$SESSION_SECONDS" "$@"
    local code=$?
    return $((code == 5 ? 0 : code))
}

# What an example needs, and no one else: a part of it is compiled, so it is not in the set-up of the quick start.
"$PYTHON" -m pip show -qq reasoning-gym 2>/dev/null ||
    "$PYTHON" -m pip install -qq --disable-pip-version-check -c .venv/constraints.txt -e ".[examples]" ||
    echo "[test] reasoning-gym could not be installed: the test of examples/gsm_symbolic is left out"

echo "[test] ruff check"
"$PYTHON" -m ruff check . || failed+=("ruff check")
echo "[test] ruff format --check"
"$PYTHON" -m ruff format --check . || failed+=("ruff format: run .venv/bin/ruff format .")
# Two sessions at once, each a core's worth of work: the fast tests and then some end-to-end ones, and the others of these.
echo "[test] pytest"
set -m # each in a process group of its own: an interrupt is not ignored, and all of the group can be ended
e2e_log=$(mktemp)
trap 'kill -- "-$e2e" 2>/dev/null; rm -f "$e2e_log"' EXIT
run_tests tests/e2e/test_[a-n]*.py "$@" >"$e2e_log" 2>&1 &
e2e=$!
run_tests tests/unit tests/engine tests/parallel tests/e2e/test_[o-z]*.py "$@" || failed+=("pytest")
echo "[test] pytest, end to end"
wait "$e2e" || failed+=("pytest, end to end")
cat "$e2e_log"

if ((${#failed[@]})); then
    printf '[test] failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "[test] all passed"
