"""Tensors in a shared-memory file that belongs to the user that runs the engine; nothing is unpickled."""

import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

from colloid.engines.contract import BadRequest, WeightUpdateBucket


class SharedMaps:
    """The files of one update, each mapped once: a sender fills the same ones again and again."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], mmap.mmap] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksum")

    @contextmanager
    def bucket(self, bucket: WeightUpdateBucket) -> Iterator[mmap.mmap]:
        """A bucket's file, mapped privately; its first `size` bytes are the bucket.

        While they are used the checksum is made in another thread: use them for what a failed update undoes.

        Raises:
            BadRequest: the file is not where it may be or is someone else's; at the end of the context: it does not
                hold what the sender wrote.
        """
        path, size = Path(bucket.path), bucket.size
        allowed = {Path("/dev/shm"), Path(tempfile.gettempdir())}
        if path.parent not in allowed:
            raise BadRequest(f"shared memory must lie in {' or '.join(map(str, sorted(allowed)))}, not at {path}")
        memory = self._map(path, size)
        made = self._thread.submit(lambda: xxhash.xxh3_128_hexdigest(memoryview(memory)[:size]))
        try:
            yield memory
        finally:
            checksum = made.result()
        if checksum != bucket.checksum:
            raise BadRequest(f"{bucket.path}: the checksum is {checksum}, the sender's is {bucket.checksum}")

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
