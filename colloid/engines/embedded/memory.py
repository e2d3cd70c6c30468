"""How much memory the key-value cache may take, and a setting of the allocator that keeps steps fast."""

import ctypes
import sys

import torch

from colloid.engines.embedded.kv_cache import bytes_per_token
from colloid.engines.embedded.model_config import ModelConfig

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
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
    """Keeps freed buffers in the process: glibc would give large ones back and page them in anew at every step."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
