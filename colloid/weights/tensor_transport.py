"""Weights to engines on the same host through shared memory: a small ring that engines read while it is written.

One call a bucket tells an engine what comes; its bytes pass through the ring, whose pages stay in the cache. So the
weights are read from memory once, and written once by each engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from colloid.engines.control import EngineControl
from colloid.engines.shared_ring import ALIGNMENT
from colloid.weights.buckets import Bucket, make_buckets
from colloid.weights.engine_update import EngineUpdate
from colloid.weights.ring_writer import RingWriter
from colloid.weights.senders import NamedTensors, Sent

RING_BYTES = 8 << 20
"""Of shared memory; little enough to stay in a cache."""
MOST_BUCKET_BYTES = 128 << 20
CALLS_AT_ONCE = 2
"""To one engine: that of a bucket which it reads to its end, and the next one's."""


class TensorSender:
    """A `WeightSender` to engines on this host.

    Args:
        buffer_size: bytes of a bucket and of the shared memory, at most; a larger tensor is a bucket of its own.
        keep: whether the shared memory is kept between updates.
    """

    def __init__(self, buffer_size: int, pause_mode: str, *, keep: bool = True):
        self._ring = RingWriter(min(RING_BYTES, buffer_size // 4))
        self._bucket_size = max(ALIGNMENT, min(buffer_size * 3 // 4, MOST_BUCKET_BYTES))
        self._pause_mode, self._keep = pause_mode, keep

    def send(self, engines: Sequence[EngineControl], version: int, tensors: NamedTensors) -> Sent:
        num_tensors, num_bytes = 0, 0
        with EngineUpdate(engines, version, self._pause_mode, calls_at_once=CALLS_AT_ONCE) as update:
            under_way: deque[list[Future]] = deque()
            try:
                self._ring.begin(len(engines))
                for bucket in make_buckets(tensors, self._bucket_size):
                    begin = self._ring.position
                    under_way.append(self._announce(update, bucket))
                    self._ring.put(bucket, lambda: _ended(under_way))
                    # So that no engine takes the next one first.
                    self._ring.wait_until_begun(begin, lambda: _ended(under_way))
                    while len(under_way) >= CALLS_AT_ONCE:
                        update.finish("bucket", under_way.popleft())
                    num_tensors += len(bucket.names)
                    num_bytes += bucket.size
                while under_way:
                    update.finish("bucket", under_way.popleft())
            except BaseException:
                self._ring.give_up()
                raise
            if not self._keep:
                self._ring.close()  # before the end, at which engines drop their maps of what is gone
            update.end(num_tensors)
        return Sent(num_tensors, num_bytes, update.seconds_paused)

    def close(self) -> None:
        """Gives the shared memory back."""
        self._ring.close()

    def _announce(self, update: EngineUpdate, bucket: Bucket) -> list[Future]:
        described = [
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "offset": at}
            for name, tensor, at in zip(bucket.names, bucket.tensors, bucket.offsets, strict=True)
        ]
        memory = {"path": str(self._ring.path), "size": bucket.size, "begin": self._ring.position}

        def payload(reader: int) -> dict[str, Any]:
            return update.version | {"shared_memory": memory | {"reader": reader}, "tensors": described}

        return update.start("/update_weights_from_tensor", payload)


def _ended(calls: Sequence[list[Future]]) -> set[int]:
    """The places of engines of which a call has failed, or the last one is over."""
    failed = {place for row in calls for place, call in enumerate(row) if call.done() and call.exception()}
    return failed | {place for place, call in enumerate(calls[-1]) if call.done()}
