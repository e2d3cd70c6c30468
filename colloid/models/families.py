"""The families of models: what sets each apart, which of them work, and why others do not.

A family is a `model_type` of Hugging Face, or several that name the same architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colloid.models.hf import rope_parameters


@dataclass(frozen=True)
class Family:
    """What no `config.json` of the family says.

    Attributes:
        experts: a mixture of experts.
        latent: multi-head latent attention (MLA).
        post_norms: norms on what attention and MLP put out, besides those on what they take.
        qk_norm: norms on queries and keys, always.
        qkv_bias: biases on queries, keys and values, where the config does not say.
        rotary_percent: the share of the head that is rotated, where the config does not say.
        rotary_interleaved: neighbours are rotated together, not halves.
    """

    experts: bool = False
    latent: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "glm4": Family(post_norms=True, qkv_bias=True, rotary_percent=0.5, rotary_interleaved=True),
    "glm4_moe": Family(experts=True, rotary_percent=0.5),
    "glm4_moe_lite": Family(experts=True, latent=True),
    "deepseek_v3": Family(experts=True, latent=True),
}

SUPPORTED_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
)
"""Those that can be trained, and that the embedded engine can generate with. Take one out, and runs refuse it."""

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""`model_type`s that name the architecture of another."""

NOT_BUILT = {
    "qwen3_next": "its linear attention and gated attention are not built",
    "qwen3_5": "its linear attention and gated attention are not built",
    "qwen3_5_text": "its linear attention and gated attention are not built",
    "qwen3_5_moe": "its linear attention and gated attention are not built",
    "qwen3_5_moe_text": "its linear attention and gated attention are not built",
    "glm_moe_dsa": "its sparse attention is not built",
    "deepseek_v32": "its sparse attention is not built",
    "minimax_m2": "its norms over all heads of queries and keys are not built",
    "mimo": "its multi-token prediction layers are not built",
}
"""`model_type`s that model scripts of this field know, and what is missing for them."""

SPECS = {
    "slime_plugins.models.glm4 get_glm_spec": "glm4",
    "slime_plugins.models.glm5.glm5 get_glm5_spec": "glm_moe_dsa",
    "slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec": "minimax_m2",
    "slime_plugins.models.qwen3_5 get_qwen3_5_spec": "qwen3_5",
    "slime_plugins.models.qwen3_5_vl get_qwen3_5_vl_model_provider": "qwen3_5",
    "slime_plugins.models.qwen3_next get_qwen3_next_spec": "qwen3_next",
}
"""Values of `--spec` in model scripts of this field, and the family whose layers each builds. Ours follow from the
model: such a value is compared with it, and nothing else."""


def family_name(config: dict[str, Any]) -> str | None:
    """The family of a `config.json`; its `model_type` where that is no family."""
    model_type = config.get("model_type")
    return SAME_AS.get(model_type, model_type)


def unsupported(config: dict[str, Any]) -> list[str]:
    """Why a model cannot be trained; empty: it can."""
    model_type, name = config.get("model_type"), family_name(config)
    if name in NOT_BUILT:
        return [f"model_type {model_type!r}: {NOT_BUILT[name]}"]
    if name not in SUPPORTED_FAMILIES:
        return [f"model_type {model_type!r} (what works: {', '.join([*SUPPORTED_FAMILIES, *_aliases()])})"]
    family = FAMILIES[name]
    reasons = [*_rope_reasons(config, family), *_attention_reasons(config, name)]
    if config.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act {config['hidden_act']!r}")
    if config.get("mlp_bias"):
        reasons.append("mlp_bias")
    if family.experts:
        reasons += _expert_reasons(config)
    if config.get("quantization_config"):
        reasons.append(
            "quantization_config: its weights are quantised; convert them to bfloat16 and leave quantization_config out"
        )
    return reasons


def _aliases() -> list[str]:
    return [alias for alias, name in SAME_AS.items() if name in SUPPORTED_FAMILIES]


def _rope_reasons(config: dict[str, Any], family: Family) -> list[str]:
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    works = ("default", "yarn") if family.latent else ("default", "llama3")
    reasons = [] if kind in works else [f"RoPE of type {kind!r} (what works: {', '.join(works)})"]
    if rope.get("attention_factor") is not None:
        reasons.append("RoPE with an attention_factor")
    if family.latent and config.get("rope_interleave", True) is False:
        reasons.append("rope_interleave false")
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part is not None and family.rotary_percent == 1.0 and float(part) != 1.0:
        reasons.append(f"partial_rotary_factor {part}")
    return reasons


def _attention_reasons(config: dict[str, Any], name: str) -> list[str]:
    reasons = []
    if config.get("attention_bias") and name not in ("qwen2", "glm4", "glm4_moe"):
        reasons.append("attention_bias")
    if config.get("use_sliding_window"):
        reasons.append("use_sliding_window")
    return reasons


def _expert_reasons(config: dict[str, Any]) -> list[str]:
    """Routers that Megatron's differs from."""
    topk, sigmoid = config.get("num_experts_per_tok") or 0, "n_routed_experts" in config
    reasons = [f"num_experts_per_tok {topk} (what works: 2 and more)"] if topk < 2 else []
    if not sigmoid:
        return reasons
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        reasons.append(f"scoring_func {config['scoring_func']!r}")
    if config.get("topk_method", "noaux_tc") != "noaux_tc":
        reasons.append(f"topk_method {config['topk_method']!r}")
    if config.get("norm_topk_prob") is False:
        reasons.append("norm_topk_prob false: Megatron always normalises sigmoid scores")
    if config.get("moe_layer_freq", 1) != 1:
        reasons.append(f"moe_layer_freq {config['moe_layer_freq']}")
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if config["n_routed_experts"] % groups:
        reasons.append(f"n_routed_experts {config['n_routed_experts']} in n_group {groups}, which does not divide it")
    if groups > 1 and topk // chosen != 2:
        reasons.append(
            f"num_experts_per_tok {topk} with topk_group {chosen}: the model scores a group by its best 2 experts, "
            f"Megatron by its best {topk // chosen}"
        )
    return reasons
