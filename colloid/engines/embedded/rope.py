"""Rotary position embedding: the frequencies that a config asks for, and the rotation itself.

Weights are permuted when packed so that the two dimensions that are rotated together lie side by side: the rotation is
one complex multiplication in place. Only the first (or, for MLA, the last) dimensions of a head may be rotated.

Shapes: `T` packed tokens, `N` heads, `R` rotated dimensions of a head.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from colloid.errors import ConfigError

# Kinds of scaling, and what config.json must say for each.
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class Rope:
    """`frequencies` [R / 2] float32: rotation per position of each pair; `magnitude` multiplies what is rotated (YaRN).

    `neighbours`: the model's own rows have the pairs side by side; otherwise dimension i goes with i + R/2.
    """

    frequencies: torch.Tensor
    magnitude: float
    neighbours: bool

    @property
    def width(self) -> int:
        return 2 * len(self.frequencies)

    def rotations(self, context_length: int) -> torch.Tensor:
        """[context_length, R / 2] complex64."""
        angles = torch.outer(torch.arange(context_length).float(), self.frequencies)
        return torch.polar(torch.full_like(angles, self.magnitude), angles)

    def row_order(self, before: int, after: int) -> torch.Tensor | None:
        """Order in which the rows of a head are packed, with rows before and after the rotated ones; None: as is."""
        if self.neighbours:
            return None
        half = torch.arange(self.width // 2) + before
        pairs = torch.stack((half, half + self.width // 2), 1).flatten()
        return torch.cat((torch.arange(before), pairs, torch.arange(after) + before + self.width))


def rotate_(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotates heads [T, N, R] (a view into a larger tensor) in place, in float32. rotations [T, 1, R / 2]."""
    wide = heads if heads.dtype is torch.float32 else heads.float()
    torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(rotations)
    if wide is not heads:
        heads.copy_(wide)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Both spellings of config.json (rope_parameters; rope_scaling beside rope_theta) as one table.

    Keys that are always there: rope_theta, rope_type, partial_rotary_factor (None where the config gives none).
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        **given,
        "rope_theta": given.get("rope_theta") or config.get("rope_theta") or 10000.0,
        "rope_type": given.get("rope_type") or given.get("type") or "default",
        "partial_rotary_factor": given.get("partial_rotary_factor", config.get("partial_rotary_factor")),
    }


def make_rope(parameters: dict[str, Any], width: int, neighbours: bool) -> Rope:
    """The rotation of `width` dimensions as Hugging Face computes it. Raises ConfigError.

    Kinds: default, linear (positions divided by a factor), llama3 (Llama 3.1: long wavelengths divided by the factor,
    short ones kept, a ramp between) and yarn (https://arxiv.org/abs/2309.00071).
    """
    theta, kind = parameters["rope_theta"], parameters["rope_type"]
    if kind not in NEEDED:
        raise ConfigError(f"RoPE scaling {kind!r} is not supported by the embedded engine: {', '.join(NEEDED)}")
    missing = [name for name in NEEDED[kind] if parameters.get(name) is None]
    if missing:
        raise ConfigError(f"RoPE scaling {kind!r} needs {', '.join(missing)}, which config.json does not give")
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    elif kind == "llama3":
        frequencies = _llama3_scaling(frequencies, parameters)
    elif kind == "yarn":
        frequencies = _yarn_scaling(frequencies, parameters, width)
    return Rope(frequencies, _yarn_magnitude(parameters) if kind == "yarn" else 1.0, neighbours)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3_scaling(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    slow = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    ramp = (original / wavelength - low) / (high - low)
    between = (1 - ramp) * slow / factor + ramp * slow
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, between, slow)


def _yarn_scaling(frequencies: torch.Tensor, parameters: dict[str, Any], width: int) -> torch.Tensor:
    """Pairs that turn fewer than beta_slow times within the original context are slowed by `factor`, those that turn
    more than beta_fast times are kept, with a ramp between."""
    original, theta = parameters["original_max_position_embeddings"], parameters["rope_theta"]

    def pair_that_turns(times: float) -> float:
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(parameters.get("beta_fast") or 32)
    last = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    slowed = ((torch.arange(width // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / parameters["factor"] * slowed + frequencies * (1 - slowed)


def _yarn_magnitude(parameters: dict[str, Any]) -> float:
    factor = parameters["factor"]
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)
