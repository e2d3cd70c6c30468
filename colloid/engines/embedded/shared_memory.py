"""Tensors that come through shared memory of the user that runs the engine; nothing is unpickled."""

import fcntl
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from colloid.engines.checksums import raw_bytes
from colloid.engines.contract import WeightUpdateBucket
from colloid.engines.contract_fields import BadRequest
from colloid.engines.shared_ring import DIGEST_BYTES, HEADER_BYTES, Ring, aligned, is_ring

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SILENCE_SECONDS = 600.0
"""After which no more is waited for, though the sender lives: it may itself wait for another engine."""
PAUSE_SECONDS = 5e-5
SECONDS_BETWEEN_LOOKS = 0.2
"""Whether the sender lives."""


@dataclass
class _Held:
    path: Path
    descriptor: int
    ring: Ring


class SharedRings:
    """Those of senders, each mapped once, as mapping takes long."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], _Held] = {}

    def tensors(
        self, bucket: WeightUpdateBucket, dtype_of: Callable[[str], torch.dtype | None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a bucket, each in memory of its own, while they are written.

        The checksum is made of each piece as it is copied, while it is in the cache, and compared after the last one:
        until then use the tensors only for what a failed update undoes.

        Args:
            dtype_of: what a tensor is converted to, by name; None: it stays as it is.

        Raises:
            BadRequest: the file is not where it may be, is someone else's or no ring, what comes is not what the sender
                wrote, or no more comes.
        """
        path = Path(bucket.path)
        allowed = {Path("/dev/shm"), Path(tempfile.gettempdir())}
        if path.parent not in allowed:
            raise BadRequest(f"shared memory must lie in {' or '.join(map(str, sorted(allowed)))}, not at {path}")
        stream = _Stream(self._hold(path), bucket)
        hasher, done = xxhash.xxh3_128(), 0
        for each in bucket.tensors:
            dtype = DTYPES[each.dtype]
            wanted = dtype_of(each.name) or dtype
            if each.offset < done:
                raise BadRequest(f"{each.name} lies at byte {each.offset}, within the tensor before")
            target = torch.empty(each.shape, dtype=wanted)
            size = target.numel() * dtype.itemsize
            done = each.offset + size
            copied = raw_bytes(target) if wanted == dtype else None
            at = 0
            for piece in stream.pieces(each.offset, size):
                if copied is not None:
                    part = copied[at : at + len(piece)]
                    np.copyto(part, piece)
                    hasher.update(part)
                else:
                    hasher.update(piece)
                    values = torch.from_numpy(piece).view(dtype)
                    first = at // dtype.itemsize
                    target.view(-1)[first : first + len(values)].copy_(values)
                at += len(piece)
            yield each.name, target
        sent = b"".join(map(bytes, stream.pieces(aligned(bucket.size), DIGEST_BYTES)))
        if hasher.digest() != sent:
            raise BadRequest(f"{path}: the checksum is {hasher.hexdigest()}, the sender's is {sent.hex()}")

    def forget(self) -> None:
        """Drops the maps of files that their sender has removed."""
        for key, held in list(self._held.items()):
            if not _is_file(held.path, key):
                self._drop(key)

    def clear(self) -> None:
        """Drops all maps."""
        for key in list(self._held):
            self._drop(key)

    def _hold(self, path: Path) -> _Held:
        descriptor = open_own(path, os.O_RDWR)
        try:
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino, status.st_size
            if key in self._held:
                return self._held[key]
            if not is_ring(os.pread(descriptor, HEADER_BYTES, 0), status.st_size):
                raise BadRequest(f"{path} is no shared memory for weights")
            held = _Held(path, os.dup(descriptor), Ring(mmap.mmap(descriptor, status.st_size)))
            self._held[key] = held
            return held
        finally:
            os.close(descriptor)

    def _drop(self, key: tuple[int, int, int]) -> None:
        os.close(self._held.pop(key).descriptor)  # unmapped with the last view of it


class _Stream:
    """One bucket, as it passes through the ring."""

    def __init__(self, held: _Held, bucket: WeightUpdateBucket):
        self._held, self._ring, self._reader = held, held.ring, bucket.reader
        self._begin = bucket.begin
        read = self._ring.read_by(self._reader)
        if read != self._begin:
            raise BadRequest(f"the bucket begins at {self._begin}, but the one before ended at {read}")

    def pieces(self, offset: int, size: int) -> Iterator[np.ndarray]:
        """uint8: the bytes from `offset` of the bucket on. Each is valid until the next is asked for."""
        position = self._begin + offset
        end = position + size
        while position < end:
            if (written := self._ring.written) <= position:
                written = self._wait(position)
            piece = self._ring.part(position, min(end, written) - position)
            yield piece
            position += len(piece)
            self._ring.set_read_by(self._reader, position)
        self._ring.set_read_by(self._reader, max(aligned(end), self._ring.read_by(self._reader)))

    def _wait(self, position: int) -> int:
        """How far the sender is, once that is beyond `position`."""
        begin = looked = time.monotonic()
        while True:
            now = time.monotonic()
            if self._ring.given_up:
                end = "the sender of the weights has given up"
            elif now - looked > SECONDS_BETWEEN_LOOKS and not _is_locked(self._held.descriptor):
                end = "the process that sent the weights has ended"
            elif now - begin > SILENCE_SECONDS:
                end = f"no more of the weights came for {SILENCE_SECONDS:g} s"
            else:
                end = ""
            # After the question whether more will come: what came before its end counts.
            if (written := self._ring.written) > position:
                return written
            if end:
                raise BadRequest(end)
            if now - looked > SECONDS_BETWEEN_LOOKS:
                looked = now
            time.sleep(PAUSE_SECONDS)


def _is_locked(descriptor: int) -> bool:
    """Whether another one has the lock of the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _is_file(path: Path, key: tuple[int, int, int]) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_dev, status.st_ino, status.st_size) == key


def open_own(path: Path, access: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file of this user. Links are not followed. Raises BadRequest."""
    try:
        descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise BadRequest(f"cannot open {path}: {error}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise BadRequest(f"{path} is not a regular file of the user that runs the engine")
    return descriptor
