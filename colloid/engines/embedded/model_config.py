"""The shape of a model, read from its Hugging Face `config.json`.

Families: Llama, Qwen2/2.5 (bias on q, k and v), Qwen3 dense (a norm on every q and k head). What a config asks for and
this engine cannot compute is an error here, before anything is loaded.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from colloid.errors import ConfigError

# What a family does where its config.json says nothing: bias on q, k and v; bias on o; norm on the q and k heads.
FAMILIES = {
    "llama": {"qkv_bias": False, "output_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "output_bias": False, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "output_bias": False, "qk_norm": True},
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model. `rope_frequencies` [head_dim / 2] are in float32, scaling applied."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    max_position_embeddings: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    rope_frequencies: torch.Tensor

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def load_model_config(model_path: str | Path) -> ModelConfig:
    """Reads `config.json` (and `generation_config.json`, for the end-of-sequence ids). Raises ConfigError."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the directory of a Hugging Face model")
    config = json.loads(path.read_text())
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type {model_type!r} is not supported by the embedded engine: {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(config, path)
    family = FAMILIES[model_type]
    attention_bias = config.get("attention_bias", False)
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return ModelConfig(
        model_type=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        norm_epsilon=config["rms_norm_eps"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family["qkv_bias"] or attention_bias,
        output_bias=family["output_bias"] or attention_bias,
        mlp_bias=config.get("mlp_bias", False),
        qk_norm=family["qk_norm"],
        eos_token_ids=_eos_token_ids(config, Path(model_path)),
        rope_frequencies=rope_frequencies(config, head_dim),
    )


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    sliding = config.get("use_sliding_window", False) and config.get("sliding_window")
    for name, value, wrong in (
        ("hidden_act", config.get("hidden_act", "silu"), config.get("hidden_act", "silu") != "silu"),
        ("use_sliding_window", sliding, bool(sliding)),
        ("quantization_config", config.get("quantization_config"), config.get("quantization_config") is not None),
    ):
        if wrong:
            raise ConfigError(f"{path}: {name} = {value!r} is not supported by the embedded engine")


def _eos_token_ids(config: dict[str, Any], directory: Path) -> tuple[int, ...]:
    """The ids of generation_config.json and config.json together; each may give one id or a list."""
    ids: list[int] = []
    generation_path = directory / "generation_config.json"
    generation = json.loads(generation_path.read_text()) if generation_path.is_file() else {}
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(sorted(set(ids)))


def rope_frequencies(config: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Rotation per position of each pair of dimensions, [head_dim / 2] float32, as Hugging Face computes it.

    Kinds: default, linear (positions divided by a factor) and llama3 (Llama 3.1: long wavelengths divided by the
    factor, short ones kept, a ramp between). Both spellings of the config are read (rope_parameters, rope_scaling).
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("a partial_rotary_factor other than 1.0 is not supported by the embedded engine")
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / parameters["factor"]
    if kind == "llama3":
        return _llama3_scaling(frequencies, parameters)
    raise ConfigError(f"RoPE scaling {kind!r} is not supported by the embedded engine: default, linear, llama3")


def _llama3_scaling(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    slow = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    ramp = (original / wavelength - low) / (high - low)
    between = (1 - ramp) * slow / factor + ramp * slow
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, between, slow)
