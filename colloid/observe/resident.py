"""How much of a machine's memory processes hold (their resident sets), as Linux counts it; elsewhere all is 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Resident:
    """Bytes: private pages, and those of files and shared memory that are mapped. What processes share counts in each.

    Attributes:
        now: at present.
        peak: the most since the processes began, or since `take_resident` asked before.
    """

    now: int = 0
    peak: int = 0

    def __add__(self, other: Resident) -> Resident:
        return Resident(self.now + other.now, self.peak + other.peak)


def resident_bytes(pid: int | str = "self") -> int:
    """What a process holds; 0 where it is gone."""
    return _status(pid).get("VmRSS", 0)


def take_resident(pid: int | str = "self") -> Resident:
    """What a process of this user holds; its peak begins anew."""
    fields = _status(pid)
    # Where the process is gone, or the system doesn't allow it, the peak is that of its whole life.
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return Resident(fields.get("VmRSS", 0), fields.get("VmHWM", 0))


def take_tree(pids: Iterable[int]) -> Resident:
    """The same of processes with all that they have started."""
    total = Resident()
    for pid in pids:
        try:
            children = psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:  # it has ended
            continue
        for each in [pid, *(child.pid for child in children)]:
            total += take_resident(each)
    return total


def _status(pid: int | str) -> dict[str, int]:
    """The fields of /proc/PID/status that are sizes, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in fields}
