"""Recorders of a process's memory: every allocation with the stack that made it.

`memray`: of the host, Python's and C's alike; `memray flamegraph FILE` and `memray stats FILE` show it. `torch`: of
CUDA's caching allocator; docs.pytorch.org/memory_viz shows the file. (The latter is not run yet.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

MOST_EVENTS = 1_000_000
"""Allocations that torch keeps; older ones are forgotten."""


class MemoryHistory(Protocol):
    """Records from the moment that it is made."""

    def finish(self) -> Path:
        """Ends the recording. Returns its file."""


class MemrayHistory:
    """Writes as it goes: what was recorded of a process that was killed can be read too."""

    def __init__(self, path: Path):
        import memray

        self._path = path
        self._tracker = memray.Tracker(path)
        self._tracker.__enter__()

    def finish(self) -> Path:
        """See `MemoryHistory`."""
        self._tracker.__exit__(None, None, None)
        return self._path


class CudaHistory:
    """Not run yet."""

    def __init__(self, path: Path):
        from torch.cuda import memory

        self._path, self._torch = path, memory
        memory._record_memory_history(max_entries=MOST_EVENTS)

    def finish(self) -> Path:
        """See `MemoryHistory`."""
        self._torch._dump_snapshot(str(self._path))
        self._torch._record_memory_history(enabled=None)
        return self._path


_KINDS = {"memray": (MemrayHistory, "memray.bin"), "torch": (CudaHistory, "pickle")}


def open_history(recorder: str, directory: Path, name: str) -> MemoryHistory:
    """Begins to record.

    Args:
        recorder: `torch` or `memray`.
        name: of the process; its file is `<name>.memray.bin` or `<name>.pickle`, with a number where that is taken.
    """
    kind, suffix = _KINDS[recorder]
    directory.mkdir(parents=True, exist_ok=True)
    path, number = directory / f"{name}.{suffix}", 1
    while path.exists():
        number += 1
        path = directory / f"{name}-{number}.{suffix}"
    return kind(path)
