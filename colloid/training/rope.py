"""Rotary frequencies with a model's own scaling. (Megatron's has the constants of Llama 3.1 built in.)"""

from __future__ import annotations

import math
from typing import Any

import torch

from colloid.errors import ConfigError


def scaled_frequencies(frequencies: torch.Tensor, hf_config: dict[str, Any]) -> torch.Tensor:
    """
    Args:
        frequencies: float32 [head size / 2], unscaled.
        hf_config: the model's `config.json`; both of its spellings of the rotary parameters are known.

    Raises:
        ConfigError: a kind of scaling that is not supported.
    """
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind != "llama3":
        raise ConfigError(f"rope scaling of type {kind!r} is not supported yet; supported are default, linear, llama3")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    # From fully scaled (at most `low` turns over the original context) to untouched (at least `high` turns).
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (share + (1 - share) / rope["factor"])
