"""From a Hugging Face `config.json` to Megatron's model arguments. Plain data in, plain data out.

Only what a config says is derived; what it leaves open is not in the result.
"""

from __future__ import annotations

import json
import os
from typing import Any

from colloid.errors import ConfigError

DENSE = ("llama", "qwen2", "qwen3")
"""`model_type`s that can be trained."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's RoPE scaling assumes."""


def read_hf_config(directory: str) -> dict[str, Any]:
    """The `config.json` of a model directory.

    Raises:
        ConfigError: it is missing, or no JSON object.
    """
    path = os.path.join(directory, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must be a JSON object")
    return config


def find_model(name: str) -> str | None:
    """The directory of a model: itself, or its snapshot in the local Hugging Face cache. Nothing is downloaded."""
    if os.path.isdir(name):
        return name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        return None
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    folder = os.path.join(
        os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"), f"models--{name.replace('/', '--')}"
    )
    try:
        with open(os.path.join(folder, "refs", "main"), encoding="utf-8") as file:
            snapshot = os.path.join(folder, "snapshots", file.read().strip())
    except OSError:
        return None
    return snapshot if os.path.isfile(os.path.join(snapshot, "config.json")) else None


def model_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Megatron's argument names and values of a dense model (`DENSE`); of others, what has the same meaning there.

    Raises:
        ConfigError: the config lacks a key.
    """
    config = config.get("text_config") or config
    model_type = config.get("model_type")
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    arguments = {
        "num_layers": _need(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": _need(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": config.get("head_dim") or hidden // heads,
        "vocab_size": _need(config, "vocab_size"),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "swiglu": config.get("hidden_act", "silu") == "silu",
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "add_bias_linear": False,
        "add_qkv_bias": bool(config.get("attention_bias", model_type == "qwen2")),
        "qk_layernorm": bool(config.get("use_qk_norm", model_type == "qwen3")),
        "position_embedding_type": "rope",
        "max_position_embeddings": config.get("max_position_embeddings"),
        "rotary_percent": float(config.get("partial_rotary_factor", 1.0)),
        **_rope(config),
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _need(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ConfigError(f"config.json of the model has no {key!r}")
    return config[key]


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one spelling: `rope_theta`, `rope_type`, and what the type needs."""
    old = {key: value for key, value in (config.get("rope_scaling") or {}).items() if value is not None}
    rope = {**old, **(config.get("rope_parameters") or {})}
    rope.setdefault("rope_theta", config.get("rope_theta") or config.get("default_theta") or 10000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    return rope


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = rope_parameters(config)
    base = float(rope["rope_theta"])
    arguments: dict[str, Any] = {"rotary_base": int(base) if base.is_integer() else base, "use_rope_scaling": False}
    if rope["rope_type"] == "llama3":
        factor = float(rope["factor"])
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": factor, "rotary_scaling_factor": factor}
    return arguments


def unsupported(config: dict[str, Any]) -> list[str]:
    """Why a model cannot be trained yet; empty: it can."""
    model_type = config.get("model_type")
    if model_type not in DENSE:
        return [f"model_type {model_type!r} (what works: {', '.join(DENSE)})"]
    reasons = []
    rope = rope_parameters(config)
    if rope["rope_type"] not in ("default", "llama3"):
        reasons.append(f"RoPE of type {rope['rope_type']!r}")
    if rope["rope_type"] == "llama3":
        reasons += [
            f"llama3 RoPE with {key} {rope[key]} (what works: {value:g})"
            for key, value in _LLAMA3_ROPE.items()
            if float(rope.get(key, value)) != value
        ]
    if config.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act {config['hidden_act']!r}")
    if model_type != "qwen2" and config.get("attention_bias"):
        reasons.append("attention_bias")
    if config.get("mlp_bias"):
        reasons.append("mlp_bias")
    if config.get("use_sliding_window"):
        reasons.append("use_sliding_window")
    if float(config.get("partial_rotary_factor", 1.0)) != 1.0:
        reasons.append(f"partial_rotary_factor {config['partial_rotary_factor']}")
    if config.get("quantization_config"):
        reasons.append("quantization_config (quantised weights)")
    return reasons
