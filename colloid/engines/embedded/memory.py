"""How much memory the key-value cache may take, a setting of the allocator that keeps steps fast, and giving memory
back to the system while a trainer needs it.
"""

import ctypes
import sys

import torch

from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_memory import KV_CACHE, TAGS, WEIGHTS, MemoryTags
from colloid.engines.embedded.engine import Engine
from colloid.engines.embedded.kv_cache import bytes_per_token
from colloid.engines.embedded.model_config import ModelConfig
from colloid.engines.embedded.update import WeightUpdates

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
FALLBACK_AVAILABLE = 4 << 30


def available_memory() -> int:
    """Bytes that could be used now without swapping (Linux: MemAvailable, and the limit of the control group)."""
    available = FALLBACK_AVAILABLE
    if sys.platform == "linux":
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_control_group_rest()])


def _control_group_rest() -> list[int]:
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            maximum = limit.read().strip()
            return [] if maximum == "max" else [max(int(maximum) - int(current.read()), 0)]
    except OSError:  # no control groups (v2) here: nothing limits beyond the machine
        return []


def cache_tokens(config: ModelConfig, dtype: torch.dtype, fraction: float, limit: int) -> int:
    """Positions that fit into `fraction` of the available memory, at most `limit` (all that could ever run)."""
    return min(int(available_memory() * fraction) // bytes_per_token(config, dtype), limit)


def keep_freed_memory() -> None:
    """Keeps freed buffers in the process: glibc would give large ones back and page them in anew at every step.

    All threads share one heap: those of other threads than the main one are given back whatever the thresholds.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Gives what is freed back to the system, also from the middle of the heap and what `keep_freed_memory` kept."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # of glibc
        libc.malloc_trim(0)


class Occupation:
    """What of the engine's memory is released, by tag. Its methods run in the compute thread. Raises BadRequest.

    Weights that were released are gone: once resumed, the engine waits for a complete weight update. Nothing is
    generated before all is resumed.
    """

    def __init__(self, engine: Engine, updates: WeightUpdates):
        self._engine, self._updates = engine, updates
        self._released: frozenset[str] = frozenset()

    @property
    def released(self) -> list[str]:
        """The tags, in the order of `TAGS`."""
        return [tag for tag in TAGS if tag in self._released]

    def release(self, request: MemoryTags) -> None:
        """Drops weights, or the cache with all that it knows of prefixes. What is released already stays so."""
        unfinished = self._engine.scheduler.in_engine()
        if unfinished:
            raise BadRequest(
                f"{len(unfinished)} samples are not finished: memory is released when nothing runs or waits; abort them"
            )
        for tag in set(request.tags) - self._released:
            if tag == WEIGHTS:
                self._updates.drop_weights()
            else:
                self._engine.release_cache()
            self._released |= {tag}
        trim()

    def resume(self, request: MemoryTags) -> None:
        """The memory may be taken again. It is, as weights arrive and as the cache is written."""
        if WEIGHTS in request.tags:
            self._updates.await_weights()
        self._released -= set(request.tags)

    def why_not_ready(self) -> str | None:
        """Why nothing can be generated now, or None."""
        if self._released:
            what = " and ".join(self.released).replace(KV_CACHE, "key-value cache")
            return f"the engine's {what} is released: call /resume_memory_occupation"
        return None
