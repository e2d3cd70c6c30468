"""Weights to engines on the same host through shared memory: a file, filled bucket by bucket.

    fill a file -> every engine copies it out -> answer

for each bucket; there are several files, so that one is filled while the engines read others. They are small, so that
what one side has written is in the cache when the other reads it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from colloid.engines.checksums import copy_hashed, raw_bytes
from colloid.engines.control import EngineControl
from colloid.errors import WeightSyncError
from colloid.weights.buckets import Bucket, make_buckets
from colloid.weights.engine_update import EngineUpdate
from colloid.weights.senders import NamedTensors, Sent

PREFIX = "colloid-weights-"
NUM_BUFFERS = 4
MOST_BUCKET_BYTES = 32 << 20
SHARED_DIRECTORIES = (Path("/dev/shm"), Path(tempfile.gettempdir()))
"""Where the file may lie, the first that has room."""


class SharedBuffer:
    """A file in shared memory that buckets are written into, one after another. Readable by this user alone.

    Its pages are reserved before they are written, so that a full /dev/shm is an error here (and another place is
    tried) rather than a crash. Closing removes it; files that killed processes left behind are removed too.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._file = -1
        self._memory: mmap.mmap | None = None

    def fill(self, bucket: Bucket) -> dict[str, Any]:
        """Copies the bucket's tensors in.

        Returns:
            What an engine needs to read them: the file, names, dtypes, shapes, offsets, and the checksum of the whole.
        """
        self._reserve(bucket.size)
        view = np.frombuffer(self._memory, np.uint8)
        hasher = xxhash.xxh3_128()
        described = []
        end = 0
        for name, tensor, offset in zip(bucket.names, bucket.tensors, bucket.offsets, strict=True):
            view[end:offset] = 0
            hasher.update(view[end:offset])
            end = offset + tensor.nbytes
            copy_hashed(raw_bytes(tensor), view[offset:end], hasher)
            dtype = str(tensor.dtype).removeprefix("torch.")
            described.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset})
        return {
            "shared_memory": {"path": str(self.path), "size": bucket.size},
            "tensors": described,
            "checksum": hasher.hexdigest(),
        }

    def close(self) -> None:
        """Removes the file."""
        self._memory = None  # unmapped with the last view of it
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def _reserve(self, size: int) -> None:
        if self._memory is not None and len(self._memory) >= size:
            return
        self.close()
        errors = []
        for directory in filter(Path.is_dir, SHARED_DIRECTORIES):
            _remove_leftovers(directory)
            path = directory / f"{PREFIX}{secrets.token_hex(8)}"
            try:
                self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                self.path = path  # only now is there anything to remove
                fcntl.flock(self._file, fcntl.LOCK_EX)
                os.posix_fallocate(self._file, 0, size)
            except OSError as error:
                errors.append(f"{directory}: {error}")
                self.close()
            else:
                self._memory = mmap.mmap(self._file, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
                return
        raise WeightSyncError(f"no room for {size} bytes of weights to share with the engines ({'; '.join(errors)})")


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


class TensorSender:
    """A `WeightSender` to engines on this host.

    Args:
        buffer_size: bytes of shared memory at most; a tensor larger than a file of it is a bucket of its own.
        keep: whether the shared memory is kept between updates, as making it takes as long as filling it.
    """

    def __init__(self, buffer_size: int, pause_mode: str, *, keep: bool = True):
        self._bucket_size = max(1, min(buffer_size // NUM_BUFFERS, MOST_BUCKET_BYTES))
        self._pause_mode, self._keep = pause_mode, keep
        self._buffers = [SharedBuffer() for _ in range(NUM_BUFFERS)]

    def send(self, engines: Sequence[EngineControl], version: int, tensors: NamedTensors) -> Sent:
        num_tensors, num_bytes = 0, 0
        with EngineUpdate(engines, version, self._pause_mode, calls_at_once=NUM_BUFFERS) as update:
            under_way: deque[list[Future]] = deque()
            try:
                for row, bucket in enumerate(make_buckets(tensors, self._bucket_size)):
                    if len(under_way) == NUM_BUFFERS:
                        update.finish("bucket", under_way.popleft())
                    payload = update.version | self._buffers[row % NUM_BUFFERS].fill(bucket)
                    under_way.append(update.start("/update_weights_from_tensor", payload))
                    num_tensors += len(bucket.names)
                    num_bytes += bucket.size
                while under_way:
                    update.finish("bucket", under_way.popleft())
            except BaseException:
                self.close()  # an engine may still read
                raise
            if not self._keep:
                self.close()  # before the end, at which engines drop their maps of what is gone
            update.end(num_tensors)
        return Sent(num_tensors, num_bytes, update.seconds_paused)

    def close(self) -> None:
        """Gives the shared memory back."""
        for buffer in self._buffers:
            buffer.close()
