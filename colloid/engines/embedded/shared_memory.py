"""Tensors in a shared-memory file that belongs to the user that runs the engine; nothing is unpickled."""

import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash

from colloid.engines.contract import WeightUpdateBucket
from colloid.engines.contract_fields import BadRequest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class SharedMaps:
    """The files of one update, each mapped once: a sender fills the same ones again and again."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], mmap.mmap] = {}

    def tensors(self, bucket: WeightUpdateBucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a bucket, as views of its file, each to be copied before the next.

        The checksum is made as they are given out, of what is in the cache then, and compared after the last: until
        then use them only for what a failed update undoes.

        Raises:
            BadRequest: the file is not where it may be, is someone else's, or does not hold what the sender wrote.
        """
        path = Path(bucket.path)
        allowed = {Path("/dev/shm"), Path(tempfile.gettempdir())}
        if path.parent not in allowed:
            raise BadRequest(f"shared memory must lie in {' or '.join(map(str, sorted(allowed)))}, not at {path}")
        memory = memoryview(self._map(path, bucket.size))[: bucket.size]
        hasher, done = xxhash.xxh3_128(), 0
        for each in bucket.tensors:
            dtype = DTYPES[each.dtype]
            count = torch.Size(each.shape).numel()
            end = max(done, each.offset + count * dtype.itemsize)
            hasher.update(memory[done:end])
            done = end
            yield each.name, torch.frombuffer(memory, dtype=dtype, count=count, offset=each.offset).view(each.shape)
        hasher.update(memory[done:])
        if hasher.hexdigest() != bucket.checksum:
            raise BadRequest(f"{path}: the checksum is {hasher.hexdigest()}, the sender's is {bucket.checksum}")

    def forget(self) -> None:
        """Maps are gone when nothing refers to them any more."""
        self._maps.clear()

    def _map(self, path: Path, size: int) -> mmap.mmap:
        descriptor = open_own(path)
        try:
            status = os.fstat(descriptor)
            if status.st_size < size:
                raise BadRequest(f"{path} has {status.st_size} bytes, the sender said {size}")
            key = status.st_dev, status.st_ino, status.st_size
            if key not in self._maps:
                self._maps[key] = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
            return self._maps[key]
        finally:
            os.close(descriptor)


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
