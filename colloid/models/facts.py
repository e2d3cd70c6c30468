"""Facts of the models that have a script: Megatron's arguments of each, and where its weights are published.

`scripts/models/*.sh` are made from this table by `scripts/make_model_scripts.py`. It is written down apart from the
derivation of the same arguments from a `config.json` (`derive.py`), so that each checks the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        name: of its script.
        checkpoint: where `--hf-checkpoint` points unless the user says: a name in the local Hugging Face cache, or a
            directory (which may use shell variables).
        family: a key of `families.FAMILIES`.
        flags: flag -> value. True: a flag without a value.
    """

    name: str
    checkpoint: str
    family: str
    flags: dict[str, Any]


def _model(name: str, checkpoint: str, family: str, *parts: dict[str, Any]) -> Model:
    common = {"--swiglu": True, "--disable-bias-linear": True, "--normalization": "RMSNorm"}
    flags = {flag: value for part in (common, *parts) for flag, value in part.items() if value is not False}
    return Model(name, checkpoint, family, dict(sorted(flags.items())))


def _size(layers: int, hidden: int, ffn: int, heads: int, vocab: int, eps: str, base: int, tied: bool = False) -> dict:
    return {
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--ffn-hidden-size": ffn,
        "--num-attention-heads": heads,
        "--vocab-size": vocab,
        "--norm-epsilon": eps,
        "--rotary-base": base,
        "--untie-embeddings-and-output-weights": not tied,
    }


def _groups(number: int, head_size: int | None = None) -> dict:
    size = {} if head_size is None else {"--kv-channels": head_size}
    return {"--group-query-attention": True, "--num-query-groups": number, **size}


def _experts(total: int, chosen: int, ffn: int, dense_layers: int, moe_layers: int) -> dict:
    return {
        "--num-experts": total,
        "--moe-router-topk": chosen,
        "--moe-ffn-hidden-size": ffn,
        "--moe-layer-freq": f"[0]*{dense_layers}+[1]*{moe_layers}",
        "--moe-aux-loss-coeff": "0",
        "--moe-router-dtype": "fp32",
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-grouped-gemm": True,
        "--moe-permute-fusion": True,
    }


def _sigmoid(shared_ffn: int, scale: str, groups: int | None = None, groups_chosen: int | None = None) -> dict:
    grouped = {"--moe-router-num-groups": groups, "--moe-router-group-topk": groups_chosen} if groups else {}
    return {
        "--moe-router-score-function": "sigmoid",
        "--moe-router-pre-softmax": True,
        "--moe-router-enable-expert-bias": True,
        "--moe-router-bias-update-rate": "0",
        "--moe-router-load-balancing-type": "seq_aux_loss",
        "--moe-router-topk-scaling-factor": scale,
        "--moe-shared-expert-intermediate-size": shared_ffn,
        **grouped,
    }


def _latent(q_rank: int | None, head: int, value_head: int, head_size: int) -> dict:
    rank = {} if q_rank is None else {"--q-lora-rank": q_rank}
    return {
        "--multi-latent-attention": True,
        "--qk-layernorm": True,
        "--kv-lora-rank": 512,
        "--qk-head-dim": head,
        "--qk-pos-emb-head-dim": 64,
        "--v-head-dim": value_head,
        "--kv-channels": head_size,
        "--position-embedding-type": "rope",
        "--no-rope-fusion": True,
        **rank,
    }


def _yarn(factor: str) -> dict:
    return {
        "--rotary-scaling-factor": factor,
        "--mscale": "1.0",
        "--mscale-all-dim": "1.0",
        "--attention-softmax-in-fp32": True,
    }


ROTARY = {"--use-rotary-position-embeddings": True}
ROPE = {"--position-embedding-type": "rope"}


def _llama3(name: str, checkpoint: str, size: dict, scaling: str | None = None) -> Model:
    scaled = {"--use-rope-scaling": True, "--rotary-scaling-factor": scaling} if scaling else {}
    length = {"--max-position-embeddings": 131072 if scaling else 8192}
    return _model(name, checkpoint, "llama", size, _groups(8, 128), ROTARY, length, scaled)


def _qwen2(name: str, size: dict, groups: int) -> Model:
    return _model(name, f"Qwen/Q{name[1:]}", "qwen2", size, _groups(groups), ROTARY, {"--add-qkv-bias": True})


def _qwen3(name: str, size: dict) -> Model:
    return _model(name, f"Qwen/Q{name[1:]}", "qwen3", size, _groups(8, 128), ROTARY, {"--qk-layernorm": True})


def _qwen3_moe(name: str, size: dict, experts: dict) -> Model:
    router = {"--moe-router-score-function": "softmax", "--moe-token-drop-policy": "probs"}
    rotary = {**ROPE, "--rotary-percent": "1.0", "--qk-layernorm": True}
    return _model(name, f"Qwen/Q{name[1:]}", "qwen3_moe", size, _groups(4, 128), rotary, experts, router)


def _glm4(name: str, checkpoint: str, size: dict, bias: bool, more: dict | None = None) -> Model:
    layout = {
        "--post-self-attn-layernorm": True,
        "--post-mlp-layernorm": True,
        "--rotary-interleaved": True,
        "--rotary-percent": "0.5",
        "--no-rope-fusion": True,
        "--add-qkv-bias": bias,
    }
    return _model(name, checkpoint, "glm4", size, _groups(2), ROTARY, layout, more or {})


def _glm4_moe(name: str, checkpoint: str, size: dict, experts: dict, router: dict, qk_norm: bool = True) -> Model:
    layout = {**ROPE, "--rotary-percent": "0.5", "--add-qkv-bias": True, "--qk-layernorm": qk_norm}
    return _model(name, checkpoint, "glm4_moe", size, _groups(8, 128), layout, experts, router)


def _glm4_large(name: str, checkpoint: str) -> Model:
    size = _size(92, 5120, 12288, 96, 151552, "1e-5", 1000000)
    return _glm4_moe(name, checkpoint, size, _experts(160, 8, 1536, 3, 89), _sigmoid(1536, "2.5"))


def _deepseek(name: str, checkpoint: str) -> Model:
    size = _size(61, 7168, 18432, 128, 129280, "1e-6", 10000)
    experts, router = _experts(256, 8, 2048, 3, 58), _sigmoid(2048, "2.5", 8, 4)
    return _model(name, checkpoint, "deepseek_v3", size, _latent(1536, 128, 128, 128), _yarn("40"), experts, router)


def _kimi(name: str, checkpoint: str, eps: str, factor: str) -> Model:
    size = _size(61, 7168, 18432, 64, 163840, eps, 50000)
    experts, router = _experts(384, 8, 2048, 1, 60), _sigmoid(2048, "2.827", 1, 1)
    return _model(name, checkpoint, "deepseek_v3", size, _latent(1536, 128, 128, 64), _yarn(factor), experts, router)


_TABLE = (
    _llama3("llama3-8B", "meta-llama/Meta-Llama-3-8B", _size(32, 4096, 14336, 32, 128256, "1e-5", 500000)),
    _llama3("llama3-70B", "meta-llama/Meta-Llama-3-70B", _size(80, 8192, 28672, 64, 128256, "1e-5", 500000)),
    _llama3(
        "llama3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        _size(32, 4096, 14336, 32, 128256, "1e-5", 500000),
        "8.0",
    ),
    _llama3(
        "llama3.2-3B-Instruct",
        "meta-llama/Llama-3.2-3B-Instruct",
        _size(28, 3072, 8192, 24, 128256, "1e-5", 500000, tied=True),
        "32.0",
    ),
    _model(
        "smollm2-135M",
        "${COLLOID_CACHE:-$HOME/.cache/colloid}/smollm2-135M-instruct",  # made by scripts/fetch_smollm2.py
        "llama",
        _size(30, 576, 1536, 9, 49152, "1e-5", 100000, tied=True),
        _groups(3),
        ROTARY,
    ),
    _qwen2("qwen2.5-0.5B", _size(24, 896, 4864, 14, 151936, "1e-6", 1000000, tied=True), 2),
    _qwen2("qwen2.5-1.5B", _size(28, 1536, 8960, 12, 151936, "1e-6", 1000000, tied=True), 2),
    _qwen2("qwen2.5-3B", _size(36, 2048, 11008, 16, 151936, "1e-6", 1000000, tied=True), 2),
    _qwen2("qwen2.5-7B", _size(28, 3584, 18944, 28, 152064, "1e-6", 1000000), 4),
    _qwen2("qwen2.5-32B", _size(64, 5120, 27648, 40, 152064, "1e-5", 1000000), 8),
    _qwen3("qwen3-0.6B", _size(28, 1024, 3072, 16, 151936, "1e-6", 1000000, tied=True)),
    _qwen3("qwen3-1.7B", _size(28, 2048, 6144, 16, 151936, "1e-6", 1000000, tied=True)),
    _qwen3("qwen3-4B", _size(36, 2560, 9728, 32, 151936, "1e-6", 1000000, tied=True)),
    _qwen3("qwen3-4B-Instruct-2507", _size(36, 2560, 9728, 32, 151936, "1e-6", 5000000, tied=True)),
    _qwen3("qwen3-8B", _size(36, 4096, 12288, 32, 151936, "1e-6", 1000000)),
    _qwen3("qwen3-14B", _size(40, 5120, 17408, 40, 151936, "1e-6", 1000000)),
    _qwen3("qwen3-32B", _size(64, 5120, 25600, 64, 151936, "1e-6", 1000000)),
    _qwen3_moe("qwen3-30B-A3B", _size(48, 2048, 6144, 32, 151936, "1e-6", 1000000), _experts(128, 8, 768, 0, 48)),
    _qwen3_moe("qwen3-235B-A22B", _size(94, 4096, 12288, 64, 151936, "1e-6", 1000000), _experts(128, 8, 1536, 0, 94)),
    _glm4("glm4-9B", "zai-org/GLM-4-9B-0414", _size(40, 4096, 13696, 32, 151552, "1e-5", 10000), bias=True),
    _glm4("glm-z1-9B", "zai-org/GLM-Z1-9B-0414", _size(40, 4096, 13696, 32, 151552, "1e-5", 10000), bias=True),
    _glm4(
        "glm4-32B",
        "zai-org/GLM-4-32B-0414",
        _size(61, 6144, 23040, 48, 151552, "1e-5", 10000),
        bias=False,
        more={"--max-position-embeddings": 32768, "--seq-length": 32768},
    ),
    _glm4_large("glm4.5-355B-A32B", "zai-org/GLM-4.5"),
    _glm4_large("glm4.6-355B-A32B", "zai-org/GLM-4.6"),
    _glm4_large("glm4.7-355B-A32B", "zai-org/GLM-4.7"),
    _glm4_moe(
        "glm4.5-106B-A12B",
        "zai-org/GLM-4.5-Air",
        _size(46, 4096, 10944, 96, 151552, "1e-5", 1000000),
        _experts(128, 8, 1408, 1, 45),
        _sigmoid(1408, "1.0"),
        qk_norm=False,
    ),
    _model(
        "glm4.7-30B-A3B",
        "zai-org/GLM-4.7-Flash",
        "glm4_moe_lite",
        _size(47, 2048, 10240, 20, 154880, "1e-5", 1000000),
        _latent(768, 192, 256, 192),
        _experts(64, 4, 1536, 1, 46),
        _sigmoid(1536, "1.8"),
        {"--add-qkv-bias": True, "--no-position-embedding": True, "--make-vocab-size-divisible-by": 64},
    ),
    _deepseek("deepseek-v3", "deepseek-ai/DeepSeek-V3"),
    _deepseek("deepseek-v3.1", "deepseek-ai/DeepSeek-V3.1"),
    _deepseek("deepseek-r1", "deepseek-ai/DeepSeek-R1"),
    _kimi("kimi-k2", "moonshotai/Kimi-K2-Instruct", "1e-6", "32.0"),
    _kimi("kimi-k2-thinking", "moonshotai/Kimi-K2-Thinking", "1e-5", "64.0"),
    _model(
        "moonlight",
        "moonshotai/Moonlight-16B-A3B",
        "deepseek_v3",
        _size(27, 2048, 11264, 16, 163840, "1e-5", 50000),
        _latent(None, 128, 128, 128),
        _yarn("1"),
        _experts(64, 6, 1408, 1, 26),
        _sigmoid(2816, "2.446", 1, 1),
        {"--rotary-percent": "1.0", "--moe-token-drop-policy": "probs", "--no-masked-softmax-fusion": True},
    ),
)

MODELS = {model.name: model for model in _TABLE}
"""By name."""


def command_line(name: str) -> list[str]:
    """The model's flags as they stand on a command line."""
    words: list[str] = []
    for flag, value in MODELS[name].flags.items():
        words += [flag] if value is True else [flag, str(value)]
    return words
