"""Weights to SGLang engines on this host through shared memory, in the form that SGLang takes: a flat tensor and where
in it each named one lies (`flattened_bucket`), pickled.

    pause -> begin -> (fill the memory -> every rank of every engine copies it out -> answer) for each bucket -> end

The pickle holds a handle on the shared memory and calls of torch's own rebuilding functions, which SGLang's unpickler
allows; none of SGLang is needed here. A handle is good for one use, so each rank of each engine gets its own. It goes
only to servers that this run has started itself. The memory belongs to torch's shared memory manager, which removes
it when nobody holds it any more, killed processes included. What an update that failed leaves is removed here.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from colloid.engines.control import EngineControl
from colloid.errors import WeightSyncError
from colloid.weights.buckets import Bucket, make_buckets
from colloid.weights.engine_update import EngineUpdate, server_facts
from colloid.weights.senders import NamedTensors, Sent

SHARED_MEMORY = "/dev/shm"


class SGLangTensorSender:
    """A `WeightSender` to SGLang engines on this host.

    Args:
        buffer_size: bytes of a bucket, and of the shared memory.
        pause_mode: with `in_place` the cache is kept, and with it prefixes that older weights have computed.
    """

    def __init__(self, buffer_size: int, pause_mode: str):
        self._buffer_size, self._pause_mode = buffer_size, pause_mode
        self._num_ranks: dict[tuple[str, str], int] = {}

    def send(self, engines: Sequence[EngineControl], version: int, tensors: NamedTensors) -> Sent:
        ranks = [self._ranks_of(engine) for engine in engines]
        memory = SharedStorage()
        num_tensors, num_bytes = 0, 0
        with EngineUpdate(engines, version, self._pause_mode, begins=False) as update, open_update(update):
            for bucket in make_buckets(tensors, self._buffer_size):
                send_bucket(update, ranks, memory, bucket, flush=num_tensors == 0 and self._pause_mode != "in_place")
                num_tensors += len(bucket.names)
                num_bytes += bucket.size
        return Sent(num_tensors, num_bytes, update.seconds_paused)

    def close(self) -> None:
        """Nothing is held between updates."""

    def _ranks_of(self, engine: EngineControl) -> int:
        key = engine.url, engine.name  # a replacement may have the address, and not the ranks, of the one before
        if key not in self._num_ranks:
            self._num_ranks[key] = num_ranks(engine)
        return self._num_ranks[key]


def num_ranks(engine: EngineControl) -> int:
    """Tensor-parallel ranks of an SGLang server."""
    return int(server_facts(engine)["tp_size"])


@contextmanager
def open_update(update: EngineUpdate) -> Iterator[None]:
    """Opens the update on all engines, and closes it whatever happens: SGLang refuses a second one beside it."""
    try:
        update.begin()
        yield
    except BaseException:
        update.give_up()
        raise
    update.post("end", "/end_weight_update")


def send_bucket(
    update: EngineUpdate, ranks: Sequence[int], memory: SharedStorage, bucket: Bucket, *, flush: bool
) -> None:
    """Hands one bucket to all engines; returns when all have copied it out.

    Args:
        ranks: of each engine.
        flush: whether the engines forget cached prefixes. Once an update is enough: nothing is generated meanwhile.

    Raises:
        WeightSyncError: names the engines that did not take it.
    """
    memory.fill(bucket)

    def payload(index: int) -> dict[str, Any]:
        return update.version | {
            "serialized_named_tensors": [memory.serialized(bucket) for _ in range(ranks[index])],
            "load_format": "flattened_bucket",
            "flush_cache": flush,
        }

    try:
        update.post("bucket", "/update_weights_from_tensor", payload)
    except BaseException:
        memory.discard()
        raise


class SharedStorage:
    """Shared memory of torch's, filled with one bucket after another."""

    def __init__(self) -> None:
        self._storage: torch.UntypedStorage | None = None

    def fill(self, bucket: Bucket) -> None:
        """Copies the bucket's tensors in, each at its offset.

        Raises:
            WeightSyncError: there is no room for them.
        """
        if self._storage is None or self._storage.nbytes() < bucket.size:
            self._storage = None
            files = os.statvfs(SHARED_MEMORY)
            free = files.f_bavail * files.f_frsize
            if free < bucket.size:
                raise WeightSyncError(
                    f"no room for {bucket.size} bytes of weights to share with the engines: {SHARED_MEMORY} has {free} "
                    "left. Lower --update-weight-buffer-size, or enlarge it"
                )
            self._storage = torch.UntypedStorage._new_using_filename_cpu(bucket.size)
        memory = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        for tensor, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def discard(self) -> None:
        """Removes the memory, also where a receiver will never take back its reference (see `serialized`), as it is
        gone. One that has it goes on reading; one that comes too late doesn't find it.
        """
        storage, self._storage = self._storage, None
        if storage is None:
            return
        storage._shared_incref()  # for good: the last one to close it would fail to remove what is removed already
        _, name, _ = storage._share_filename_cpu_()
        Path(SHARED_MEMORY, name.decode().lstrip("/")).unlink(missing_ok=True)

    def serialized(self, bucket: Bucket) -> str:
        """What one rank needs to read the bucket, once: base64 of a pickle."""
        storage = self._storage
        assert storage is not None, "fill comes first"
        handle = storage._share_filename_cpu_()
        storage._shared_incref()  # the receiver takes it back when it has mapped the memory
        untyped = _Call(reductions.rebuild_storage_filename, torch.UntypedStorage, *handle)
        typed = _Call(reductions.rebuild_typed_storage, untyped, torch.uint8)
        flat = _Call(reductions.rebuild_tensor, torch.Tensor, typed, (0, (bucket.size,), (1,), False))
        metadata = [
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=offset,
                end_idx=offset + tensor.nbytes,
                numel=tensor.nbytes,
            )
            for name, tensor, offset in zip(bucket.names, bucket.tensors, bucket.offsets, strict=True)
        ]
        return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": metadata})).decode()


class _Call:
    """Unpickles as the result of a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self._reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return self._reduced
