"""The engine's side of the groups in which a trainer broadcasts weights.

An engine that refuses what it is sent, or cannot use it, leaves the group: that ends its connections, so that neither
the trainer nor another engine waits for it.
"""

from collections.abc import Iterator

import torch
import xxhash

from colloid.engines.addresses import address_towards
from colloid.engines.checksums import raw_bytes
from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_weights import BroadcastBucket, GroupStart
from colloid.engines.embedded.shared_memory import DTYPES
from colloid.engines.process_group import UpdateGroup, connect_store


class UpdateGroups:
    """Its methods run in the compute thread. Raises BadRequest."""

    def __init__(self) -> None:
        self._groups: dict[str, UpdateGroup] = {}

    def join(self, start: GroupStart) -> None:
        """Returns when all ranks are there."""
        if start.backend != "gloo":
            raise BadRequest(f"backend {start.backend}: this engine computes on the CPU, where the backend is gloo")
        if start.name in self._groups:
            raise BadRequest(f"the engine is in a group {start.name!r} already: destroy it first")
        try:
            store = connect_store(start.host, start.port, start.timeout)
            own = address_towards(start.host)
            group = UpdateGroup(start.backend, store, start.rank, start.size, start.name, own, start.timeout)
        except (RuntimeError, OSError) as error:
            raise BadRequest(f"cannot join the group {start.name!r} at {start.host}:{start.port}: {error}") from error
        self._groups[start.name] = group

    def leave(self, name: str) -> None:
        if self._groups.pop(name, None) is None:
            raise BadRequest(f"the engine is in no group {name!r}")

    def leave_all(self) -> None:
        """Whoever waits for this engine in a group is told."""
        self._groups.clear()

    def receive(self, bucket: BroadcastBucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as they come, each in memory of its own; the checksum is compared after the last."""
        if bucket.group not in self._groups:
            raise BadRequest(f"the engine is in no group {bucket.group!r}: call /init_weights_update_group first")
        group, hasher = self._groups[bucket.group], xxhash.xxh3_128()
        for described in bucket.tensors:
            tensor = torch.empty(described.shape, dtype=DTYPES[described.dtype])
            try:
                group.broadcast(tensor).wait()
            except RuntimeError as error:
                raise BadRequest(f"{described.name} did not come: {error}") from error
            if bucket.checksum:
                hasher.update(raw_bytes(tensor))
            yield described.name, tensor
        if bucket.checksum and hasher.hexdigest() != bucket.checksum:
            raise BadRequest(f"the checksum of what came is {hasher.hexdigest()}, the sender's is {bucket.checksum}")
