"""A delta on disk: a directory with a manifest and files of blocks. Written by the trainer, read by engines.

    delta.json      versions, encoding, checksum algorithm; of each changed tensor its blocks and the result's checksum
    delta-00000.bin the blocks one after another

Tensors that are not listed did not change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colloid.engines import delta
from colloid.engines.checksums import ALGORITHMS, digest
from colloid.engines.contract import ITEM_SIZES
from colloid.errors import WeightSyncError

MANIFEST = "delta.json"
FORMAT = 1


@dataclass(frozen=True)
class StoredBlock:
    """A block's place in the file of its tensor; the rest as in `delta.Block`."""

    offset: int
    size: int
    checksum: str
    start: int
    count: int
    layout: str
    changed: int


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor with its blocks. `checksum`: of all of its bytes once they are applied."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    file: str
    blocks: tuple[StoredBlock, ...]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Manifest:
    """What a directory holds."""

    weight_version: str
    base_version: str
    encoding: str
    checksum: str
    tensors: tuple[ChangedTensor, ...] = field(repr=False)
    format: int = FORMAT

    def write(self, directory: Path) -> int:
        """Returns its bytes."""
        return (directory / MANIFEST).write_text(json.dumps(asdict(self), separators=(",", ":")))

    @classmethod
    def parse(cls, text: str | bytes) -> Manifest:
        """Raises WeightSyncError for anything that no sender writes."""
        try:
            body = json.loads(text)
            found = cls(**{**body, "tensors": tuple(_tensor(each) for each in body["tensors"])})
            known = found.format == FORMAT and found.encoding in delta.ENCODINGS and found.checksum in ALGORITHMS
            if not known or not all(isinstance(each, str) for each in (found.weight_version, found.base_version)):
                raise ValueError(f"format {found.format!r}, {found.encoding!r}, {found.checksum!r}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightSyncError(f"not a delta's manifest: {error}") from error
        return found


def _tensor(body: dict[str, Any]) -> ChangedTensor:
    blocks = tuple(StoredBlock(**block) for block in body["blocks"])
    found = ChangedTensor(**{**body, "blocks": blocks, "shape": tuple(body["shape"])})
    if not isinstance(found.name, str) or found.dtype not in ITEM_SIZES or Path(found.file).name != found.file:
        raise ValueError(f"tensor {found.name!r} of {found.dtype!r} in {found.file!r}")
    if not all(isinstance(n, int) and n > 0 for n in found.shape):
        raise ValueError(f"{found.name}: shape {found.shape}")
    end = 0
    for block in blocks:
        numbers = (block.offset, block.size, block.start, block.count, block.changed)
        inside = all(isinstance(n, int) and n >= 0 for n in numbers) and block.count <= delta.BLOCK
        if not inside or block.start < end or block.start + block.count > found.count:
            raise ValueError(f"{found.name}: a block at {block.start!r} of {block.count!r} elements")
        end = block.start + block.count
    return found


def read_blocks(tensor: ChangedTensor, descriptor: int, algorithm: str) -> Iterator[delta.Block]:
    """The blocks of a tensor, checked one by one.

    Args:
        descriptor: of the tensor's file.

    Raises:
        WeightSyncError: a block is not there, or not as it was written.
    """
    for block in tensor.blocks:
        data = os.pread(descriptor, block.size, block.offset)
        if len(data) != block.size or digest(data, algorithm) != block.checksum:
            raise WeightSyncError(f"{tensor.name}: a block of {tensor.file} did not arrive as it was written")
        yield delta.Block(block.start, block.count, block.layout, block.changed, data)


class DeltaWriter:
    """Writes a delta; use it tensor by tensor, then `finish`.

    Args:
        directory: exists and is empty.
        file_bytes: about how much a file holds.
    """

    def __init__(self, directory: Path, encoding: str, checksum: str, file_bytes: int = 1 << 30):
        self._directory, self._encoding, self._checksum, self._file_bytes = directory, encoding, checksum, file_bytes
        self._tensors: list[ChangedTensor] = []
        self._file: Any = None
        self._number, self._name = -1, ""
        self.num_bytes = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], raw: np.ndarray, blocks: Iterator[delta.Block]) -> int:
        """Adds a tensor, unless there are no blocks; returns the elements whose values were written.

        Args:
            raw: uint8, all of its new bytes.
        """
        stored = []
        for block in blocks:
            file = self._open()
            place = StoredBlock(
                file.tell(),
                len(block.data),
                digest(block.data, self._checksum),
                block.start,
                block.count,
                block.layout,
                block.changed,
            )
            file.write(block.data)
            self.num_bytes += len(block.data)
            stored.append(place)
        if stored:
            checksum = digest(raw, self._checksum)
            self._tensors.append(ChangedTensor(name, dtype, shape, checksum, self._name, tuple(stored)))
            if self._file.tell() >= self._file_bytes:
                self.close()
        return sum(block.changed for block in stored)

    def finish(self, weight_version: str, base_version: str) -> Manifest:
        """Writes the manifest: the directory is a delta from then on."""
        self.close()
        manifest = Manifest(weight_version, base_version, self._encoding, self._checksum, tuple(self._tensors))
        self.num_bytes += manifest.write(self._directory)
        return manifest

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> Any:
        if self._file is None:
            self._number += 1
            self._name = f"delta-{self._number:05d}.bin"
            self._file = (self._directory / self._name).open("wb")
        return self._file
