# colloid for machines with NVIDIA GPUs: CUDA 13, SGLang, Megatron-Core, Transformer Engine. Not built or run yet.
#
#   docker build -t colloid .
#   docker run --gpus all --ipc host --network host --ulimit memlock=-1 -v /shared:/shared -w /shared colloid \
#       python /opt/colloid/train.py --colocate …                  one node; several: docs/cluster.md
#
# --ipc host: weights and NCCL go through /dev/shm. --network host: Ray, NCCL and the engines choose ports.
#
# The versions fit each other: SGLang 0.5.23 is the one whose options colloid has in its table, and brings the torch,
# transformers and CUDA 13 kernels that it is pinned to; with Python before 3.12 requirements.txt pins Megatron-Core.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu22.04

ARG SGLANG_VERSION=0.5.23
ARG TRANSFORMER_ENGINE_VERSION=2.20.2
# Compilations of Transformer Engine at a time; each takes several GB of memory.
ARG MAX_JOBS=8

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# libnuma: SGLang; ibverbs: NCCL over InfiniBand.
RUN apt-get update && apt-get install -y --no-install-recommends \
        build-essential cmake git ibverbs-providers libibverbs1 libnuma1 ninja-build \
        python3.10 python3.10-dev python3.10-venv tini \
    && rm -rf /var/lib/apt/lists/*

RUN python3.10 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# First what decides on torch, so that nothing that comes later does.
RUN pip install --upgrade pip setuptools wheel packaging pybind11 \
    && pip install "sglang==${SGLANG_VERSION}" \
    && pip freeze | grep -iE '^(torch|transformers|triton|sglang)==' > /opt/constraints.txt

# Its extension for torch is compiled against the torch that is there. FlashAttention is not needed: Transformer Engine
# has cuDNN's attention, SGLang brings its own kernels.
RUN MAX_JOBS=${MAX_JOBS} NVTE_FRAMEWORK=pytorch pip install --no-build-isolation -c /opt/constraints.txt \
        "transformer-engine[pytorch]==${TRANSFORMER_ENGINE_VERSION}"

WORKDIR /opt/colloid
COPY requirements.txt pyproject.toml README.md LICENSE ./
RUN pip install -c /opt/constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-deps -e . \
    && python -c "import ray, sglang, torch, transformer_engine.pytorch, megatron.core"

ENV HF_HUB_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    OMP_NUM_THREADS=1

# tini hands signals on and reaps: a node's engines end with it.
ENTRYPOINT ["tini", "-g", "--", "/opt/colloid/scripts/docker_entrypoint.sh"]
CMD ["python", "/opt/colloid/train.py", "--help"]
