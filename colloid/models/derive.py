"""From a Hugging Face `config.json` to Megatron's model arguments, for every family of `families.py`.

Only what a config says is derived. A value of None says that the model has no such part (`num_experts` of a dense
model); what has no meaning for a model (the head size of one with latent attention) is not in the result, so that
nothing is compared with it.
"""

from __future__ import annotations

from typing import Any

from colloid.errors import ConfigError
from colloid.models.families import FAMILIES, Family, family_name
from colloid.models.hf import expert_layers, need, rope_parameters


def model_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Megatron's argument names and values of a model; of one of an unknown family, what a dense model would have.

    Raises:
        ConfigError: the config lacks a key.
    """
    config = config.get("text_config") or config
    family = FAMILIES.get(family_name(config) or "", Family())
    arguments = {
        "num_layers": need(config, "num_hidden_layers"),
        "hidden_size": need(config, "hidden_size"),
        "num_attention_heads": need(config, "num_attention_heads"),
        "vocab_size": need(config, "vocab_size"),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "swiglu": config.get("hidden_act", "silu") == "silu",
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": _number(rope_parameters(config)["rope_theta"]),
        "rotary_percent": _rotary_percent(config, family),
        "multi_latent_attention": family.latent,
        "post_self_attn_layernorm": family.post_norms,
        "post_mlp_layernorm": family.post_norms,
    }
    arguments |= _latent_attention(config) if family.latent else _attention(config, family)
    arguments |= _experts(config) if family.experts else {"num_experts": None}
    # Some models of experts alone have no width of a dense layer.
    ffn = config.get("intermediate_size") or (config.get("moe_intermediate_size") if family.experts else None)
    arguments["ffn_hidden_size"] = ffn or need(config, "intermediate_size")
    if config.get("max_position_embeddings") is not None:
        arguments["max_position_embeddings"] = config["max_position_embeddings"]
    return arguments


def _attention(config: dict[str, Any], family: Family) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return {
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "add_qkv_bias": bool(config.get("attention_bias", family.qkv_bias)),
        "qk_layernorm": family.qk_norm or bool(config.get("use_qk_norm")),
        "rotary_interleaved": family.rotary_interleaved,
        **_rope_scaling(rope_parameters(config)),
    }


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] != "llama3":
        return {"use_rope_scaling": False}
    factor = float(_of_rope(rope, "factor"))
    return {"use_rope_scaling": True, "rope_scaling_factor": factor, "rotary_scaling_factor": factor}


def _of_rope(rope: dict[str, Any], key: str) -> Any:
    if rope.get(key) is None:
        raise ConfigError(f"config.json of the model has RoPE of type {rope['rope_type']!r} without {key!r}")
    return rope[key]


def _rotary_percent(config: dict[str, Any], family: Family) -> float:
    if family.latent:
        return 1.0
    part = rope_parameters(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return float(family.rotary_percent if part is None else part)


def _latent_attention(config: dict[str, Any]) -> dict[str, Any]:
    """`qk_layernorm` stands for the norms on the latents, which every such model has."""
    rope = rope_parameters(config)
    arguments = {
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": need(config, "kv_lora_rank"),
        "qk_head_dim": need(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": need(config, "qk_rope_head_dim"),
        "v_head_dim": need(config, "v_head_dim"),
        "qk_layernorm": True,
    }
    if rope["rope_type"] != "yarn":
        # Megatron's softmax scale uses the factor whatever the type is, and its default is 40.
        return arguments | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return arguments | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(_of_rope(rope, "factor")),
        "original_max_position_embeddings": _of_rope(rope, "original_max_position_embeddings"),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(rope.get("mscale") or 1.0),
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
    }


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    sigmoid = "n_routed_experts" in config
    size = need(config, "moe_intermediate_size")
    arguments = {
        "num_experts": config.get("n_routed_experts") or config.get("num_local_experts") or need(config, "num_experts"),
        "moe_ffn_hidden_size": size,
        "moe_router_topk": need(config, "num_experts_per_tok"),
        "moe_layer_freq": expert_layers(config),
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
        "moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * size or None,
    }
    if not sigmoid:
        # The softmax over the chosen experts is that over all of them, normalised again.
        return arguments | {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)}
    return arguments | {
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
        "moe_router_num_groups": config.get("n_group") or 1,
        "moe_router_group_topk": config.get("topk_group") or 1,
    }


def _number(value: Any) -> int | float:
    return int(value) if float(value).is_integer() else float(value)
