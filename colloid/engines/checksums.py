"""Checksums of weights: of whole tensors, and of the blocks of a delta."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

TENSOR_CHECKSUM = "xxh3-128"
"""Of whole tensors, wherever no other is asked for."""
CHECKSUMS_FILE = "colloid_weights.json"
"""Beside the weights of a directory that a trainer wrote: `{"tensors": {name: checksum}}`."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _blake3() -> Any:
    from blake3 import blake3

    return blake3()


ALGORITHMS: dict[str, Callable[[], Any]] = {"xxh3-128": xxhash.xxh3_128, "blake3": _blake3, "adler32": _Adler32}
"""Name -> what makes a hasher with `update(bytes)` and `hexdigest()`."""


def digest(data: Any, algorithm: str = TENSOR_CHECKSUM) -> str:
    """The checksum of a bytes-like object, in hexadecimal."""
    hasher = ALGORITHMS[algorithm]()
    hasher.update(data)
    return hasher.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8 [nbytes]: the tensor's little-endian bytes, row-major; a view where it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def tensor_checksum(tensor: torch.Tensor, algorithm: str = TENSOR_CHECKSUM) -> str:
    """The checksum of a tensor's raw bytes."""
    return digest(raw_bytes(tensor), algorithm)
