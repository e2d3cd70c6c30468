"""What changed between two versions of the weights, as bytes: blocks of a tensor, each encoded by itself.

A tensor is taken in blocks of at most `BLOCK` elements, so that memory is bounded whatever its size. Elements are
compared and moved as integers of their width. A block is

    sparse   positions of the changed elements (as gaps) and their values
    dense    all values, where so many changed that positions would cost more
    whole    all new values, whatever the base is: what is sent again

The values are the new ones (`overwrite`) or the differences to the old (`xor`: small changes leave the upper bytes
zero, which compresses best). All is split into byte planes and compressed with zstd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from colloid.errors import WeightSyncError

BLOCK = 1 << 21
"""Elements."""
ENCODINGS = ("xor", "overwrite")
LAYOUTS = ("sparse", "dense", "whole")
COMPRESSION_LEVEL = 3
_DENSE_SHARE = 0.3
"""Of changed elements, from which on positions don't pay."""
_WIDTHS = {2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Block:
    """An encoded block.

    Attributes:
        start: the block's first element in its tensor.
        count: elements of the block.
        changed: elements whose values are in `data`.
        data: compressed.
    """

    start: int
    count: int
    layout: str
    changed: int
    data: bytes


def elements(raw: np.ndarray, width: int) -> np.ndarray:
    """Bytes as unsigned integers of `width` bytes."""
    return raw.view(_WIDTHS[width])


def ranges(count: int) -> Iterator[tuple[int, int]]:
    """(start, elements) of each block of a tensor with `count` elements."""
    for start in range(0, count, BLOCK):
        yield start, min(BLOCK, count - start)


def encode(old: np.ndarray, new: np.ndarray, start: int, encoding: str) -> Block | None:
    """A block, or None where nothing changed.

    Args:
        old, new: unsigned integers [count].
        start: of the block in its tensor.
        encoding: one of `ENCODINGS`.
    """
    difference = old ^ new
    positions = np.flatnonzero(difference)
    if not len(positions):
        return None
    values = difference if encoding == "xor" else new
    if len(positions) > _DENSE_SHARE * len(new):
        return Block(start, len(new), "dense", len(new), _pack([values]))
    gaps = np.diff(positions, prepend=-1).astype(np.uint32)
    return Block(start, len(new), "sparse", len(positions), _pack([gaps, values[positions]]))


def encode_whole(new: np.ndarray, start: int) -> Block:
    """A block that needs no base."""
    return Block(start, len(new), "whole", len(new), _pack([new]))


def apply(block: Block, target: np.ndarray, encoding: str) -> None:
    """Makes the new values of the old ones, in place.

    Args:
        target: unsigned integers [block.count], the block's part of the tensor.

    Raises:
        WeightSyncError: the data are not those of such a block.
    """
    if block.layout not in LAYOUTS or not 0 < block.changed <= block.count == len(target):
        raise WeightSyncError(f"a block of {block.changed} of {block.count} elements, {block.layout!r}")
    width = target.dtype.itemsize
    if block.layout != "sparse":
        if block.changed != block.count:
            raise WeightSyncError(f"a {block.layout} block has {block.changed} of {block.count} elements")
        (values,) = _unpack(block.data, block.count, [width])
        if encoding == "xor" and block.layout == "dense":
            target ^= values
        else:
            target[:] = values
        return
    gaps, values = _unpack(block.data, block.changed, [4, width])
    positions = np.cumsum(gaps, dtype=np.int64) - 1
    if gaps.min() < 1 or positions[-1] >= block.count:
        raise WeightSyncError("a sparse block has positions outside of it")
    if encoding == "xor":
        target[positions] ^= values
    else:
        target[positions] = values


def _pack(columns: list[np.ndarray]) -> bytes:
    """Byte planes of all columns one after another, compressed."""
    planes = [np.ascontiguousarray(column).view(np.uint8).reshape(len(column), -1).T for column in columns]
    return _codec().compress(b"".join(plane.tobytes() for plane in planes), asbytes=True)


def _unpack(data: bytes, count: int, widths: list[int]) -> list[np.ndarray]:
    size = count * sum(widths)
    try:
        raw = np.frombuffer(_codec().decompress(data, decompressed_size=size, asbytes=True), np.uint8)
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"a block cannot be decompressed: {error}") from error
    if len(raw) != size:
        raise WeightSyncError(f"a block has {len(raw)} bytes where {size} are expected")
    columns, begin = [], 0
    for width in widths:
        planes = raw[begin : begin + count * width].reshape(width, count)
        columns.append(np.ascontiguousarray(planes.T).view(_WIDTHS[width]).reshape(count))
        begin += count * width
    return columns


def _codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=COMPRESSION_LEVEL)
