"""Replacing the model's weights while the process lives: begin, tensors in any of several ways, end.

Tensors come through shared memory, through a process group, or from files of this user; nothing is unpickled. Between
begin and a successful end the weights are a mixture, and nothing is generated with them.
"""

from pathlib import Path
from typing import Any

import torch

from colloid.engines.contract import WeightUpdateBucket, WeightUpdateEnd, WeightUpdateStart
from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_weights import BroadcastBucket, DiskUpdate
from colloid.engines.embedded.engine import Engine
from colloid.engines.embedded.shared_memory import SharedRings
from colloid.engines.embedded.update_disk import WeightFiles
from colloid.engines.embedded.update_group import UpdateGroups
from colloid.engines.embedded.weights import WeightStore
from colloid.errors import WeightSyncError


class WeightUpdates:
    """The state of the update protocol; its methods run in the compute thread. Raises BadRequest.

    Args:
        places: directories that weights may be read from.
    """

    def __init__(self, engine: Engine, store: WeightStore, places: tuple[Path, ...] = ()):
        self._engine = engine
        self._store = store
        self._version: str | None = None  # of the update that is going on
        self._num_received = 0
        self._awaited: frozenset[str] = frozenset()  # what of a delta is to come again
        self._files = WeightFiles(places)
        self._rings = SharedRings()
        self.groups = UpdateGroups()
        self.weights_complete = True
        self._takes_weights = True

    @property
    def is_broken(self) -> bool:
        """Whether the weights are a mixture and no update is going on that could make them whole."""
        return not self.weights_complete and self._version is None

    def check_can_continue(self) -> None:
        """Raises, and gives up an update that is going on, if the weights are a mixture."""
        self._rings.forget()
        if not self.weights_complete:
            self._version = None
            raise BadRequest("a weight update was not completed: send a complete one before generation continues")

    def drop_weights(self) -> None:
        """Frees the weights, and takes no others until `await_weights`."""
        if self._version is not None:
            raise BadRequest(f"the update to version {self._version!r} is going on: end it before memory is released")
        self._rings.clear()
        self._store.drop()
        self.weights_complete = self._takes_weights = False

    def await_weights(self) -> None:
        """After `drop_weights`: a complete update may come."""
        self._takes_weights = True

    def begin(self, start: WeightUpdateStart, is_paused: bool) -> None:
        self._check_may_begin(is_paused)
        self._version, self._num_received, self._awaited = start.weight_version, 0, frozenset()
        self._store.begin()

    def receive(self, bucket: WeightUpdateBucket) -> None:
        """Reads, checks and installs the tensors of one bucket; on return the file may be filled anew."""
        self._check_version(bucket.weight_version)
        self.weights_complete = False
        for name, tensor in self._rings.tensors(bucket, self._store.dtype_of):
            self._take(name, tensor, copy=False)

    def receive_broadcast(self, bucket: BroadcastBucket) -> None:
        """Takes part in the broadcast of each tensor, and installs it."""
        try:
            self._check_version(bucket.weight_version)
            self.weights_complete = False
            for name, tensor in self.groups.receive(bucket):
                self._take(name, tensor, copy=False)
        except BaseException:
            self.groups.leave_all()
            raise

    def end(self, end: WeightUpdateEnd) -> None:
        """Raises unless the update is complete; then the engine has the new version and an empty prefix cache."""
        self._check_version(end.weight_version)
        self._rings.forget()
        self._version = None
        self.weights_complete = False
        try:
            if self._num_received != end.num_tensors:
                raise WeightSyncError(f"{self._num_received} tensors were received, the sender sent {end.num_tensors}")
            self._store.finish()
        except WeightSyncError as error:
            raise BadRequest(str(error)) from error
        self._complete(end.weight_version)

    def read(self, update: DiskUpdate, is_paused: bool) -> dict[str, Any]:
        """Replaces the weights by those of a directory, or by what a delta makes of them; the body of the answer.

        Of a delta whose base is not what the engine holds nothing is taken. One of which parts did not arrive leaves
        the update going on, until those are sent again in a further delta.
        """
        self._check_may_begin(is_paused)
        version = update.weight_version or self._engine.weight_version
        failed: list[str] = []
        if update.is_delta:
            delta = self._files.delta(update.path)
            self._check_base(delta.base_version, delta.weight_version, delta.names)
            delta.check(self._store)
            self._version, self.weights_complete = delta.weight_version, False
            failed = delta.apply(self._store)
            version, num_tensors = delta.weight_version, len(delta.names) - len(failed)
        else:
            directory = self._files.directory(update.path)
            self._version, self._num_received, self._awaited = version, 0, frozenset()
            self._store.begin()
            self.weights_complete = False
            try:
                for name, tensor in directory.tensors(self._store.model.config.num_layers):
                    self._take(name, tensor)
                self._store.finish()
            except WeightSyncError as error:
                raise BadRequest(str(error)) from error
            num_tensors = self._num_received
        self._awaited = frozenset(failed)
        if failed:
            message = f"{len(failed)} tensors did not arrive: send them again"
            return {"success": False, "message": message, "failed_tensors": failed, "weight_version": version}
        self._version = None
        self._complete(version)
        return {"success": True, "message": f"{num_tensors} tensors", "weight_version": version}

    def _check_may_begin(self, is_paused: bool) -> None:
        if not is_paused:
            raise BadRequest("weights are updated while generation is paused: call /pause_generation first")
        if not self._takes_weights:
            raise BadRequest("the engine's weights are released: call /resume_memory_occupation first")

    def _check_base(self, base: str, version: str, names: list[str]) -> None:
        if self._awaited and self._version == version:
            lacking = sorted(self._awaited - set(names))
            if lacking:
                raise BadRequest(f"{len(lacking)} tensors are awaited and not in this delta: {', '.join(lacking[:4])}")
            return
        if not self.weights_complete:
            raise BadRequest("the weights are a mixture, which no delta completes: send all of them")
        if base != self._engine.weight_version:
            raise BadRequest(
                f"the delta is from version {base!r} to {version!r}, but this engine holds version "
                f"{self._engine.weight_version!r}: send all weights"
            )

    def _take(self, name: str, tensor: torch.Tensor, *, copy: bool = True) -> None:
        try:
            self._store.receive(name, tensor, copy=copy)
        except WeightSyncError as error:
            raise BadRequest(str(error)) from error
        self._num_received += 1

    def _complete(self, version: str) -> None:
        self.weights_complete = True
        self._engine.weight_version = version
        self._engine.forget_prefixes()

    def _check_version(self, version: str) -> None:
        if self._version is None:
            raise BadRequest("no weight update is going on: call /begin_weight_update first")
        if version != self._version:
            raise BadRequest(f"weight_version is {version!r}, but the update that was begun is {self._version!r}")
