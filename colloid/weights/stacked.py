"""Checkpoints whose experts are stacked: one tensor for all of a layer's, as transformers holds them in memory.

    …mlp.experts.gate_up_proj  [experts, 2 * units, hidden]     …mlp.experts.down_proj  [experts, hidden, units]

Every name table knows experts one by one, as nearly all checkpoints have them; here a stacked tensor is taken apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Slice:
    """Where a tensor lies in a stacked one: rows `begin` to `end` of an expert."""

    name: str
    expert: int
    begin: int
    end: int


def is_stacked(name: str) -> bool:
    """Whether the tensor of this name holds all experts of a layer."""
    return _STACKED.fullmatch(name) is not None


def single_experts(name: str, shape: tuple[int, ...]) -> dict[str, Slice]:
    """The names of single tensors, and what part of the stacked tensor `name` each is."""
    found = _STACKED.fullmatch(name)
    assert found is not None
    prefix, projection = found.groups()
    experts, rows = shape[:2]
    names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    size = rows // len(names)
    return {
        f"{prefix}.{expert}.{part}.weight": Slice(name, expert, row * size, (row + 1) * size)
        for expert in range(experts)
        for row, part in enumerate(names)
    }
