"""Named tensors in buckets of bounded size, so that a sync or an export never holds a whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

ALIGNMENT = 64
"""Bytes: of each tensor's offset in its bucket."""


@dataclass
class Bucket:
    """Tensors, and where each lies when they are laid out one after another."""

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Bytes."""
    size: int = 0
    """Bytes, from the first tensor's begin to the last one's end."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.offsets.append(-(-self.size // ALIGNMENT) * ALIGNMENT)
        self.names.append(name)
        self.tensors.append(tensor)
        self.size = self.offsets[-1] + tensor.nbytes


def make_buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Fills one bucket after another; the order is kept.

    A bucket is at most `max_bytes` large. A single tensor beyond that has one of its own. Tensors are taken from the
    iterable only when the bucket before is done with.
    """
    bucket = Bucket()
    for name, tensor in named_tensors:
        if bucket.names and bucket.size + ALIGNMENT + tensor.nbytes > max_bytes:
            yield bucket
            bucket = Bucket()
        bucket.add(name, tensor)
    if bucket.names:
        yield bucket
