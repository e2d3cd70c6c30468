"""How much of a machine's memory a process holds (its resident set), as the system counts it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    """VmRSS of a process: its private pages, and those of files and shared memory that it has mapped. 0 where it is
    gone, and where there is no /proc.
    """
    return _status(pid).get("VmRSS", 0)


def peak_resident_bytes(pid: int | str = "self") -> int:
    """The largest VmRSS since the process began, or since `forget_peak`."""
    return _status(pid).get("VmHWM", 0)


def forget_peak(pid: int | str = "self") -> None:
    """From now on `peak_resident_bytes` starts at the present size. Only of this user's processes."""
    path = Path(f"/proc/{pid}/clear_refs")
    if path.exists():
        path.write_text("5")


def tree_resident_bytes(pids: Iterable[int]) -> int:
    """Of processes with all that they have started. Pages that several share are counted with each."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    todo, total = list(pids), 0
    while todo:
        pid = todo.pop()
        total += resident_bytes(pid)
        todo += children.get(pid, [])
    return total


def _status(pid: int | str) -> dict[str, int]:
    """The fields of /proc/PID/status that are sizes, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in fields}
