"""Weights to engines anywhere through a process group: this rank broadcasts, every rank of every engine receives.

The group is made before the first update and kept; a new one is made when the engines are others, and after a failure.
`nccl` has not been run yet.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch
import xxhash

from colloid.engines.addresses import address_for
from colloid.engines.checksums import raw_bytes
from colloid.engines.control import EngineControl
from colloid.engines.process_group import UpdateGroup, serve_store
from colloid.errors import EngineError, WeightSyncError
from colloid.weights.buckets import Bucket, make_buckets
from colloid.weights.engine_update import EngineUpdate, server_facts
from colloid.weights.senders import NamedTensors, Sent

logger = logging.getLogger(__name__)

LEAST_POLL_SECONDS, MOST_POLL_SECONDS = 2e-5, 2e-3
"""Between looks at a broadcast: models have many small tensors, and large ones."""
MOST_JOIN_SECONDS = 120.0
"""For all ranks to make a group: whoever waits for an engine that hangs generates nothing."""
LEAVE_SECONDS = 10.0
"""After which an engine that does not answer is left in its group."""


class BroadcastSender:
    """A `WeightSender` over gloo or nccl.

    Args:
        backend: `gloo` or `nccl`.
    """

    def __init__(self, backend: str, buffer_size: int, pause_mode: str):
        self._backend, self._buffer_size, self._pause_mode = backend, buffer_size, pause_mode
        self._group: UpdateGroup | None = None
        self._name = ""
        self._engines: list[EngineControl] = []
        self._embedded: list[bool] = []

    def send(self, engines: Sequence[EngineControl], version: int, tensors: NamedTensors) -> Sent:
        num_tensors, num_bytes = 0, 0
        if _identities(engines) != _identities(self._engines):
            self.close()
        if self._group is None:
            self._join(list(engines))
        with EngineUpdate(engines, version, self._pause_mode) as update:
            try:
                for bucket in make_buckets(tensors, self._buffer_size):
                    # Prefixes that older weights have computed; once is enough, as nothing is generated meanwhile.
                    self._send_bucket(update, bucket, flush=num_tensors == 0 and self._pause_mode != "in_place")
                    num_tensors += len(bucket.names)
                    num_bytes += sum(tensor.nbytes for tensor in bucket.tensors)
            except BaseException:
                self._abandon()  # before the engines are spoken to again: one may wait for a tensor
                raise
            update.end(num_tensors)
        return Sent(num_tensors, num_bytes, update.seconds_paused)

    def close(self) -> None:
        """Leaves the group, and has the engines leave it."""
        if self._group is None:
            return
        threads = ThreadPoolExecutor(len(self._engines) or 1, thread_name_prefix="leave")
        wait([threads.submit(_leave, engine, self._name) for engine in self._engines], LEAVE_SECONDS)
        threads.shutdown(wait=False)
        self._engines = []
        self._abandon()

    def _send_bucket(self, update: EngineUpdate, bucket: Bucket, *, flush: bool) -> None:
        assert self._group is not None
        device = "cpu" if self._backend == "gloo" else "cuda"
        values = [tensor.detach().to(device).contiguous() for tensor in bucket.tensors]
        body = update.version | {
            "names": bucket.names,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in values],
            "shapes": [list(tensor.shape) for tensor in values],
            "group_name": self._name,
            "flush_cache": flush,
        }
        checked = body | {"checksum": _checksum(values)} if any(self._embedded) else body
        calls = update.start(
            "/update_weights_from_distributed", lambda index: checked if self._embedded[index] else body
        )
        try:
            for tensor in values:
                self._broadcast(tensor, calls)
        except RuntimeError as error:
            message = str(error)
            self._abandon()
            update.finish("bucket", calls)  # an engine's own words say more
            raise WeightSyncError(f"the weights could not be broadcast to the engines: {message}") from None
        update.finish("bucket", calls)

    def _broadcast(self, tensor: torch.Tensor, calls: list[Future]) -> None:
        work = self._group.broadcast(tensor)
        pause = LEAST_POLL_SECONDS
        try:
            while not work.is_completed():
                if any(call.done() and call.exception() is not None for call in calls):
                    raise RuntimeError("an engine refused")
                time.sleep(pause)
                pause = min(2 * pause, MOST_POLL_SECONDS)
            work.wait()
        finally:
            del work  # it holds the connections; an error's traceback would keep it

    def _join(self, engines: list[EngineControl]) -> None:
        """Makes the group; every engine has as many ranks in it as it has tensor-parallel ones."""
        infos = [server_facts(engine) for engine in engines]
        sizes = [int(info.get("tp_size") or 1) for info in infos]
        embedded = [info.get("engine") == "embedded" for info in infos]
        offsets = [1 + sum(sizes[:row]) for row in range(len(sizes))]
        host, size = address_for(engine.url for engine in engines), 1 + sum(sizes)
        timeout = min([MOST_JOIN_SECONDS, *(engine.timeout for engine in engines)])
        name = f"colloid-weights-{secrets.token_hex(4)}"
        store, port = serve_store(host, size, timeout)
        common = {
            "master_address": host,
            "master_port": port,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        own_fields_of = [{"timeout": timeout} if is_embedded else {} for is_embedded in embedded]
        threads = ThreadPoolExecutor(len(engines) + 1, thread_name_prefix="join")
        own = threads.submit(UpdateGroup, self._backend, store, 0, size, name, host, timeout)
        calls = [
            threads.submit(engine.post, "/init_weights_update_group", common | own_fields | {"rank_offset": offset})
            for engine, offset, own_fields in zip(engines, offsets, own_fields_of, strict=True)
        ]
        done, _ = wait([own, *calls], None, FIRST_EXCEPTION)
        threads.shutdown(wait=False)
        problems = [str(call.exception()) for call in done if call.exception() is not None]
        if problems:
            raise WeightSyncError(
                f"the engines and the trainer could not form a {self._backend} group for weights: {'; '.join(problems)}"
            )
        self._group, self._name, self._engines = own.result(), name, engines
        self._embedded = embedded

    def _abandon(self) -> None:
        """Ends this side's connections, which the other ranks notice; has engines that don't wait for a tensor end
        theirs, so that nothing here waits for them. Returns at once.
        """
        if self._group is None:
            return
        held, self._group = [self._group], None
        engines, self._engines = self._engines, []
        threading.Thread(target=held.clear, name="leave", daemon=True).start()
        for engine in engines:
            threading.Thread(target=_leave, args=(engine, self._name), name="leave", daemon=True).start()


def _identities(engines: Sequence[EngineControl]) -> list[tuple[str, str]]:
    """A replacement may have the address of the one before, and is in no group."""
    return [(engine.url, engine.name) for engine in engines]


def _leave(engine: EngineControl, group: str) -> None:
    try:
        engine.post("/destroy_weights_update_group", {"group_name": group})
    except EngineError as error:
        logger.debug("an engine has left its group already, or is gone: %s", error)


def _checksum(tensors: list[torch.Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        hasher.update(raw_bytes(tensor))
    return hasher.hexdigest()
