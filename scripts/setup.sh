#!/usr/bin/env bash
# Makes the virtual environment .venv with colloid and all that it needs. What is done already is found and left alone.
#
#   bash scripts/setup.sh            PYTHON          the Python to use (default: python3; 3.10 or newer)
#                                    COLLOID_TORCH   what pip installs as torch (default: see install_torch below)
#
# On a machine with CUDA whose Python has a torch built for it, that torch is used and not installed again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly STAMP="$VENV/colloid-setup"
readonly CPU_TORCH="torch==2.13.0"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 PYTHONNOUSERSITE=1

say() { echo "[setup] $*"; }
fail() { echo "[setup] error: $*" >&2; exit 1; }

main() {
    local python=${PYTHON:-python3}
    if [[ -x $VENV/bin/python && -f $STAMP && $(cat "$STAMP") == $(fingerprint) ]]; then
        say "$VENV is ready"
        return
    fi
    make_venv "$python"
    install_torch
    install_rest
    fingerprint >"$STAMP"
    say "done: $VENV"
}

# Changes when what is to be installed changes, or when the environment was moved or made with another Python.
fingerprint() {
    "$VENV/bin/python" - "$VENV" pyproject.toml requirements.txt <<'PYTHON' || true
import hashlib, pathlib, sys
digest = hashlib.sha256(f"{sys.version} {pathlib.Path(sys.argv[1]).resolve()}".encode())
for name in sys.argv[2:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}

make_venv() {
    local python=$1
    if [[ -e $VENV ]]; then
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
            fail "$VENV is there but its Python or pip does not run: delete it (rm -r $VENV), and run this again"
        say "$VENV is there: installing what is missing"
        return
    fi
    command -v "$python" >/dev/null || fail "there is no $python: install Python 3.10 or newer, or name one with PYTHON="
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old: colloid needs 3.10 or newer; name one with PYTHON="
    local flags=()
    if has_cuda_torch "$python"; then
        say "CUDA is here, and $python has a torch for it: the environment shares the packages of $python"
        flags=(--system-site-packages)
    fi
    say "making the virtual environment $VENV with $("$python" --version)"
    "$python" -m venv ${flags[@]+"${flags[@]}"} "$VENV" || {
        rm -rf "$VENV"
        fail "python -m venv failed (on Debian and Ubuntu it is in the package python3-venv)"
    }
}

install_torch() {
    if "$VENV/bin/python" -W ignore -c 'import torch' 2>/dev/null; then
        say "torch $(torch_version) is there"
        return
    fi
    local torch=$CPU_TORCH
    if has_cuda; then torch="torch>=2.6"; fi
    torch=${COLLOID_TORCH:-$torch}
    say "installing $torch (the largest part: minutes, where it has to be downloaded)"
    # Unquoted, so that COLLOID_TORCH can hold options of pip's too (--index-url …).
    # shellcheck disable=SC2086
    pip_install "torch" $torch
    "$VENV/bin/python" -W ignore -c 'import torch' || fail "torch was installed but cannot be imported (see above)"
}

# torch comes first and is held fast here: else pip may replace it, to satisfy something else, by another build.
install_rest() {
    say "installing colloid and what it needs (a minute or two)"
    echo "torch==$(torch_version)" >"$VENV/constraints.txt"
    pip_install "requirements.txt" -c "$VENV/constraints.txt" -e ".[dev,quickstart]"
}

pip_install() {
    local what=$1 bar=off
    shift
    if [[ -t 1 ]]; then bar=on; fi
    "$VENV/bin/python" -m pip install -qq --progress-bar "$bar" "$@" ||
        fail "pip could not install $what: the reason is above. pip's own settings (index, proxy, certificate) apply:" \
            "see '$VENV/bin/python -m pip config list'"
}

torch_version() { "$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))'; }
has_cuda() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }
# Not where $1 is a virtual environment's own Python: what is installed there cannot be shared with another one.
has_cuda_torch() {
    has_cuda && "$1" -W ignore - 2>/dev/null <<'PYTHON'
import sys, torch
sys.exit(torch.version.cuda is None or sys.prefix != sys.base_prefix)
PYTHON
}

main "$@"
