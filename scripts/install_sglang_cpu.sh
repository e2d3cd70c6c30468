#!/usr/bin/env bash
# Installs the real SGLang for a machine without CUDA, into an environment of its own (2.3 GB, minutes). colloid finds it
# there; nothing of colloid's own environment is touched, and nothing of SGLang is changed.
#
#   bash scripts/install_sglang_cpu.sh [DIRECTORY]     default: .venv-sglang
#                                                      PYTHON: the Python to use (default: python3; 3.10 or newer)
#
# SGLang's requirements that need CUDA are left out. Two stubs (scripts/sglang_cpu_stubs/) stand in for what is imported
# nevertheless: the CUDA kernels, none of which is called on a CPU, and two operators of torchvision.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=${1:-.venv-sglang}
readonly SGLANG="sglang==0.5.23" TORCH="torch==2.13.0"
readonly WITHOUT_DEPENDENCIES=(xgrammar==0.2.7 apache-tvm-ffi==0.1.11 triton==3.9.0 torchvision==0.28.0)
readonly STAMP="$VENV/colloid-sglang"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 PYTHONNOUSERSITE=1

say() { echo "[sglang] $*"; }
fail() { echo "[sglang] error: $*" >&2; exit 1; }
pip_install() { "$VENV/bin/python" -m pip install -q "$@" || fail "pip could not install $1: the reason is above"; }

main() {
    if [[ -f $STAMP && $(cat "$STAMP") == "$(fingerprint)" ]]; then
        say "$VENV is ready"
        return
    fi
    if [[ ! -x $VENV/bin/python ]]; then
        say "making the virtual environment $VENV"
        "${PYTHON:-python3}" -m venv "$VENV"
    fi
    say "installing $TORCH"
    pip_install "$TORCH" packaging
    say "installing $SGLANG and what it needs on a CPU"
    pip_install "$SGLANG" --no-deps
    requirements >"$VENV/requirements.txt"
    echo "$TORCH" >"$VENV/constraints.txt"
    pip_install -r "$VENV/requirements.txt" -c "$VENV/constraints.txt"
    pip_install "${WITHOUT_DEPENDENCIES[@]}" --no-deps
    cp -r scripts/sglang_cpu_stubs/. "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    say "trying it"
    "$VENV/bin/python" -W ignore -c 'import sglang.launch_server' || fail "SGLang was installed but cannot be imported"
    fingerprint >"$STAMP"
    say "done: $VENV. colloid takes it with --rollout-engine sglang"
}

fingerprint() {
    cat scripts/install_sglang_cpu.sh scripts/sglang_cpu_stubs/*.p* scripts/sglang_cpu_stubs/*/*.py | sha256sum
}

# SGLang's requirements without those that need CUDA, and without torch, which is there.
requirements() {
    "$VENV/bin/python" - <<'PYTHON'
import importlib.metadata
from packaging.requirements import Requirement

without = """torch torchaudio torchvision torchcodec flashinfer-python humming-kernels nvidia-cutlass-dsl nvidia-mathdx
nvshmem4py-cu13 quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel tilelang cuda-python flash-attn-4
torch-memory-saver timm modelscope kernels deepseek-recipe tml-renderers xgrammar smg-grpc-servicer apache-tvm-ffi""".split()
for line in importlib.metadata.requires("sglang"):
    requirement = Requirement(line)
    here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if here and requirement.name.lower().replace("_", "-") not in without:
        requirement.marker = None
        print(requirement)
PYTHON
}

main "$@"
