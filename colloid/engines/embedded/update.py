"""Replacing the model's weights while the process lives: begin, buckets through shared memory, end.

The engine takes descriptors as JSON and reads tensors from a file in shared memory that belongs to the same user;
nothing is unpickled. Between begin and a successful end the weights are a mixture, and nothing is generated with them.
"""

import mmap
import os
import stat
import tempfile
from pathlib import Path

import torch
import xxhash

from colloid.engines.contract import BadRequest, WeightUpdateBucket, WeightUpdateEnd, WeightUpdateStart
from colloid.engines.embedded.engine import Engine
from colloid.engines.embedded.weights import WeightStore
from colloid.errors import WeightSyncError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class WeightUpdates:
    """The state of the update protocol; its methods run in the compute thread. Raises BadRequest."""

    def __init__(self, engine: Engine, store: WeightStore):
        self._engine = engine
        self._store = store
        self._version: str | None = None  # of the update that is going on
        self._num_received = 0
        self.weights_complete = True

    @property
    def is_broken(self) -> bool:
        """Whether the weights are a mixture and no update is going on that could make them whole."""
        return not self.weights_complete and self._version is None

    def check_can_continue(self) -> None:
        """Raises, and gives up an update that is going on, if the weights are a mixture."""
        if not self.weights_complete:
            self._version = None
            raise BadRequest("a weight update was not completed: send a complete one before generation continues")

    def begin(self, start: WeightUpdateStart, is_paused: bool) -> None:
        if not is_paused:
            raise BadRequest("weights are updated while generation is paused: call /pause_generation first")
        self._version, self._num_received = start.weight_version, 0
        self._store.begin()

    def receive(self, bucket: WeightUpdateBucket) -> None:
        """Reads, checks and installs the tensors of one bucket; on return the file may be filled anew."""
        self._check_version(bucket.weight_version)
        self.weights_complete = False
        memory = _map_shared(bucket)
        checksum = xxhash.xxh3_128_hexdigest(memory)
        if checksum != bucket.checksum:
            raise BadRequest(f"{bucket.path}: the checksum is {checksum}, the sender's is {bucket.checksum}")
        for tensor in bucket.tensors:
            count = torch.Size(tensor.shape).numel()
            view = torch.frombuffer(memory, dtype=DTYPES[tensor.dtype], count=count, offset=tensor.offset)
            try:
                self._store.receive(tensor.name, view.view(tensor.shape))
            except WeightSyncError as error:
                raise BadRequest(str(error)) from error
            self._num_received += 1

    def end(self, end: WeightUpdateEnd) -> None:
        """Raises unless the update is complete; then the engine has the new version and an empty prefix cache."""
        self._check_version(end.weight_version)
        self._version = None
        self.weights_complete = False
        try:
            if self._num_received != end.num_tensors:
                raise WeightSyncError(f"{self._num_received} tensors were received, the sender sent {end.num_tensors}")
            self._store.finish()
        except WeightSyncError as error:
            raise BadRequest(str(error)) from error
        self.weights_complete = True
        self._engine.weight_version = end.weight_version
        self._engine.forget_prefixes()

    def _check_version(self, version: str) -> None:
        if self._version is None:
            raise BadRequest("no weight update is going on: call /begin_weight_update first")
        if version != self._version:
            raise BadRequest(f"weight_version is {version!r}, but the update that was begun is {self._version!r}")


def _map_shared(bucket: WeightUpdateBucket) -> mmap.mmap:
    """The first `size` bytes of a bucket's file, mapped privately; unmapped when nothing refers to it any more."""
    path, size = Path(bucket.path), bucket.size
    allowed = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    if path.parent not in allowed:
        raise BadRequest(f"shared memory must lie in {' or '.join(map(str, sorted(allowed)))}, not at {path}")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise BadRequest(f"cannot open the shared memory {path}: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise BadRequest(f"{path} is not a regular file of the user that runs the engine")
        if status.st_size < size:
            raise BadRequest(f"{path} has {status.st_size} bytes, the sender said {size}")
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
