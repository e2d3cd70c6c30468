"""Tensors in a shared-memory file that belongs to the user that runs the engine; nothing is unpickled."""

import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from colloid.engines.checksums import PIECE_BYTES, copy_hashed, raw_bytes
from colloid.engines.contract import WeightUpdateBucket
from colloid.engines.contract_fields import BadRequest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class SharedMaps:
    """Files of a sender, each mapped once: it fills them again and again, and mapping takes as long as reading."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], tuple[Path, mmap.mmap]] = {}

    def tensors(
        self, bucket: WeightUpdateBucket, dtype_of: Callable[[str], torch.dtype | None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a bucket, each in memory of its own.

        The checksum is made of each piece as it is copied, while it is in the cache, and compared after the last one:
        until then use the tensors only for what a failed update undoes.

        Args:
            dtype_of: what a tensor is converted to, by name; None: it stays as it is.

        Raises:
            BadRequest: the file is not where it may be, is someone else's, or does not hold what the sender wrote.
        """
        path = Path(bucket.path)
        allowed = {Path("/dev/shm"), Path(tempfile.gettempdir())}
        if path.parent not in allowed:
            raise BadRequest(f"shared memory must lie in {' or '.join(map(str, sorted(allowed)))}, not at {path}")
        memory = memoryview(self._map(path, bucket.size))[: bucket.size]
        raw = np.frombuffer(memory, np.uint8)
        hasher, done = xxhash.xxh3_128(), 0
        for each in bucket.tensors:
            dtype = DTYPES[each.dtype]
            wanted = dtype_of(each.name) or dtype
            size = torch.Size(each.shape).numel() * dtype.itemsize
            if each.offset < done:
                raise BadRequest(f"{each.name} lies at byte {each.offset}, within the tensor before")
            hasher.update(raw[done : each.offset])
            done = each.offset + size
            target = torch.empty(each.shape, dtype=wanted)
            if wanted == dtype:
                copy_hashed(raw[each.offset : done], raw_bytes(target), hasher)
            else:
                source = torch.frombuffer(memory, dtype=dtype, count=target.numel(), offset=each.offset)
                _convert_hashed(source, target.view(-1), hasher)
            yield each.name, target
        hasher.update(raw[done:])
        if hasher.hexdigest() != bucket.checksum:
            raise BadRequest(f"{path}: the checksum is {hasher.hexdigest()}, the sender's is {bucket.checksum}")

    def forget(self) -> None:
        """Drops the maps of files that their sender has removed."""
        self._maps = {key: held for key, held in self._maps.items() if _is_file(held[0], key)}

    def clear(self) -> None:
        """Drops all maps."""
        self._maps.clear()

    def _map(self, path: Path, size: int) -> mmap.mmap:
        descriptor = open_own(path)
        try:
            status = os.fstat(descriptor)
            if status.st_size < size:
                raise BadRequest(f"{path} has {status.st_size} bytes, the sender said {size}")
            key = status.st_dev, status.st_ino, status.st_size
            if key not in self._maps:
                self._maps[key] = path, mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
            return self._maps[key][1]
        finally:
            os.close(descriptor)


def _is_file(path: Path, key: tuple[int, int, int]) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_dev, status.st_ino, status.st_size) == key


def _convert_hashed(source: torch.Tensor, target: torch.Tensor, hasher: Any) -> None:
    """Copies elements piece by piece into another dtype; the checksum is that of the source."""
    count = PIECE_BYTES // source.itemsize
    for begin in range(0, len(source), count):
        piece = source[begin : begin + count]
        hasher.update(raw_bytes(piece))
        target[begin : begin + count].copy_(piece)


def open_own(path: Path) -> int:
    """A descriptor of a regular file of this user, for reading. Links are not followed. Raises BadRequest."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise BadRequest(f"cannot open {path}: {error}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise BadRequest(f"{path} is not a regular file of the user that runs the engine")
    return descriptor
