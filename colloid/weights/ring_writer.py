"""The writing side of a ring of shared memory (`colloid.engines.shared_ring`), and what killed writers left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import xxhash

from colloid.engines.checksums import raw_bytes
from colloid.engines.shared_ring import DIGEST_BYTES, HEADER_BYTES, Ring, aligned
from colloid.errors import WeightSyncError
from colloid.weights.buckets import Bucket

PREFIX = "colloid-weights-"
SHARED_DIRECTORIES = (Path("/dev/shm"), Path(tempfile.gettempdir()))
"""Where the file may lie, the first that has room."""
STALL_SECONDS = 60.0
"""After which a reader that takes nothing is no longer waited for."""
PAUSE_SECONDS = 5e-5


class RingWriter:
    """Writes buckets for several readers at once. The file is readable by this user alone.

    Its pages are reserved before they are written, so that a full /dev/shm is an error here (and another place is
    tried) rather than a crash. Closing removes it; files that killed processes left behind are removed too.

    Args:
        size: bytes of the ring at most.
    """

    def __init__(self, size: int):
        self._size = max(aligned(1), size // aligned(1) * aligned(1))
        self.path: Path | None = None
        self._file = -1
        self._ring: Ring | None = None
        self._readers: set[int] = set()
        self.position = 0
        """Where the next bucket begins."""

    def begin(self, num_readers: int) -> None:
        """From here on there are so many readers, which have read all so far.

        Raises:
            WeightSyncError: there is no room for the file.
        """
        if self._ring is None:
            self._ring = self._make()
            self.position = 0
        self._readers = set(range(num_readers))
        for reader in self._readers:
            self._ring.set_read_by(reader, self.position)

    def put(self, bucket: Bucket, lost: Callable[[], Iterable[int]]) -> None:
        """Writes a bucket, and the checksum of its tensors, as readers make room.

        Args:
            lost: readers that read no more; asked again and again while one lags.
        """
        begin, hasher = self.position, xxhash.xxh3_128()
        for tensor, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            self._write(begin + offset, raw_bytes(tensor), lost, hasher)
        end = begin + aligned(bucket.size)
        self._write(end, np.frombuffer(hasher.digest(), np.uint8), lost)
        self.position = self._ring.written = aligned(end + DIGEST_BYTES)

    def wait_until_begun(self, position: int, lost: Callable[[], Iterable[int]]) -> None:
        """Returns once all readers are beyond a position, but for those that are lost."""
        self._wait_for(lambda reader: self._ring.read_by(reader) <= position, lost)

    def give_up(self) -> None:
        """Readers that wait fail at once. Removes the file."""
        if self._ring is not None:
            self._ring.give_up()
        self.close()

    def close(self) -> None:
        """Removes the file."""
        self._ring = None  # unmapped with the last view of it
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def _write(
        self, position: int, data: np.ndarray, lost: Callable[[], Iterable[int]], hasher: xxhash.xxh3_128 | None = None
    ) -> None:
        done = 0
        while done < len(data):
            place = self._ring.part(position, len(data) - done)
            last = position + len(place) - self._ring.size  # what lies there is overwritten
            self._wait_for(lambda reader, last=last: self._ring.read_by(reader) < last, lost)
            np.copyto(place, data[done : done + len(place)])
            if hasher is not None:
                hasher.update(place)  # of what was written, while it is in the cache
            done += len(place)
            position += len(place)
            self._ring.written = position

    def _wait_for(self, lags: Callable[[int], bool], lost: Callable[[], Iterable[int]]) -> None:
        """Returns once no reader lags. One that is lost, or stands still for long, is waited for no more."""
        begin, before = time.monotonic(), -1
        while slow := [reader for reader in self._readers if lags(reader)]:
            time.sleep(PAUSE_SECONDS)
            gone = set(lost())  # these are where they will be
            self._readers -= {reader for reader in gone if lags(reader)}
            least = min(map(self._ring.read_by, slow))
            if least != before:
                begin, before = time.monotonic(), least
            elif time.monotonic() - begin > STALL_SECONDS:
                self._readers -= set(slow)  # their calls fail at their deadline

    def _make(self) -> Ring:
        size, errors = HEADER_BYTES + self._size, []
        for directory in filter(Path.is_dir, SHARED_DIRECTORIES):
            _remove_leftovers(directory)
            path = directory / f"{PREFIX}{secrets.token_hex(8)}"
            try:
                self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                self.path = path
                fcntl.flock(self._file, fcntl.LOCK_EX)
                os.posix_fallocate(self._file, 0, size)
            except OSError as error:
                errors.append(f"{directory}: {error}")
                self.close()
            else:
                memory = mmap.mmap(self._file, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
                ring = Ring(memory)
                ring.format()
                return ring
        raise WeightSyncError(f"no room for {size} bytes to share weights with the engines ({'; '.join(errors)})")


def remove_leftovers() -> None:
    """Removes what processes of this user that were killed have left in shared memory."""
    for directory in filter(Path.is_dir, SHARED_DIRECTORIES):
        _remove_leftovers(directory)


def _remove_leftovers(directory: Path) -> None:
    """A living owner holds the lock of its file; one without bytes is about to be locked."""
    for path in directory.glob(PREFIX + "*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # someone else's, or removed by another run meanwhile
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(file)
            if status.st_uid == os.getuid() and status.st_size:
                path.unlink(missing_ok=True)
        except BlockingIOError:  # its owner lives
            pass
        finally:
            os.close(file)
