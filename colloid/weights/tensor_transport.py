"""Weights to engines on the same host through shared memory: one file, filled bucket by bucket.

    pause -> begin -> (fill the file -> every engine copies it out -> answer) for each bucket -> end -> continue

Every engine that was paused is continued, whatever happens in between. An engine that missed a part refuses to
generate until it gets a complete update.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash

from colloid.engines.control import EngineControl
from colloid.errors import EngineError, WeightSyncError
from colloid.weights.buckets import Bucket

logger = logging.getLogger(__name__)

PREFIX = "colloid-weights-"
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
        view = torch.frombuffer(self._memory, dtype=torch.uint8)
        described = []
        end = 0
        for name, tensor, offset in zip(bucket.names, bucket.tensors, bucket.offsets, strict=True):
            view[end:offset] = 0
            end = offset + tensor.nbytes
            view[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            described.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset})
        return {
            "shared_memory": {"path": str(self.path), "size": bucket.size},
            "tensors": described,
            "checksum": xxhash.xxh3_128_hexdigest(view[: bucket.size].numpy()),
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
            self.path = directory / f"{PREFIX}{secrets.token_hex(8)}"
            self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
                os.posix_fallocate(self._file, 0, size)
            except OSError as error:
                errors.append(f"{directory}: {error}")
                self.close()
            else:
                self._memory = mmap.mmap(self._file, size)
                return
        raise WeightSyncError(f"no room for {size} bytes of weights to share with the engines ({'; '.join(errors)})")


def _remove_leftovers(directory: Path) -> None:
    """A living owner holds the lock of its file."""
    for path in directory.glob(PREFIX + "*"):
        if path.stat().st_uid != os.getuid():
            continue
        file = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(file)


class EngineUpdate:
    """One update of all engines to a version; a context in which they are paused.

    Args:
        engines: all are spoken to at the same time.
        pause_mode: what becomes of running requests: `in_place`, `retract` or `abort`.
    """

    def __init__(self, engines: Sequence[EngineControl], version: int, pause_mode: str = "retract"):
        self._engines = list(engines)
        self._version = {"weight_version": str(version)}
        self._pause_mode = pause_mode
        self._buffer = SharedBuffer()
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(self._engines)), thread_name_prefix="weights")
        self._begin = 0.0
        self.num_tensors = 0
        self.num_bytes = 0
        self.seconds_paused = 0.0
        """From the first engine's pause until all go on."""

    def __enter__(self) -> EngineUpdate:
        self._begin = time.monotonic()
        try:
            self._all("pause", lambda engine: engine.post("/pause_generation", {"mode": self._pause_mode}))
            self._all("begin", lambda engine: engine.post("/begin_weight_update", self._version))
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def send(self, bucket: Bucket) -> None:
        """Hands one bucket to every engine; returns when all have copied it out.

        Raises:
            WeightSyncError: names the engines that did not take it.
        """
        payload = self._version | self._buffer.fill(bucket)
        self._all("bucket", lambda engine: engine.post("/update_weights_from_tensor", payload))
        self.num_tensors += len(bucket.names)
        self.num_bytes += bucket.size

    def end(self, num_tensors: int) -> None:
        """Has every engine check that it got `num_tensors` tensors, all of its own, and switch to the version."""
        payload = self._version | {"num_tensors": num_tensors}
        self._all("end", lambda engine: engine.post("/end_weight_update", payload))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffer.close()
        try:
            self._all("continue", lambda engine: engine.post("/continue_generation"))
        except WeightSyncError as failed:
            # The first failure says more; an engine that is gone can't be continued either.
            if error is None:
                raise
            logger.warning("%s", failed)
        finally:
            self.seconds_paused = time.monotonic() - self._begin
            self._threads.shutdown()

    def _all(self, what: str, call: Callable[[EngineControl], Any]) -> None:
        futures = [self._threads.submit(call, engine) for engine in self._engines]
        failed = []
        for future in futures:
            try:
                future.result()
            except EngineError as error:
                failed.append(str(error))
        if failed:
            raise WeightSyncError(
                f"weight update to version {self._version['weight_version']}, {what}: {len(failed)} of "
                f"{len(self._engines)} engines failed: {'; '.join(failed)}"
            )


def checksum(tensor: torch.Tensor) -> str:
    """xxh3_128 of the tensor's raw little-endian bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
