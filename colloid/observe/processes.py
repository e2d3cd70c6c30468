"""Memory and processor time of a run's processes on this host, by their roles.

Which processes belong to the run follows from who started them; their role, from their command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil

GIB = 1024**3

ROLES: tuple[tuple[str, str], ...] = (
    ("trainer", r"^ray::TrainWorker"),
    ("critic", r"^ray::CriticWorker"),
    ("rollout", r"^ray::RolloutActor"),
    ("router", r"sglang_router|sglang-router|\bsmg\b"),
    ("engine", r"colloid\.engines\.embedded|sglang[.:]"),
    ("grader", r"colloid\.rewards|colloid/rewards"),
    ("data", r"colloid\.data\.worker"),
)
"""Role -> what its command line has in it; the first that is found counts."""

DRIVER, OTHER = "driver", "other"
"""The process that the loop runs in; everything else (Ray's own processes, sandboxes, ...)."""


@dataclass(frozen=True)
class RoleUse:
    """The processes of a role on a host.

    Attributes:
        rss_gib: their resident memory, summed; what they share is counted in each.
        rss_gib_max: of the largest.
        cpu_percent: summed; 100 is one core.
    """

    num_processes: int
    rss_gib: float
    rss_gib_max: float
    cpu_percent: float

    def __add__(self, other: RoleUse) -> RoleUse:
        return RoleUse(
            self.num_processes + other.num_processes,
            self.rss_gib + other.rss_gib,
            max(self.rss_gib_max, other.rss_gib_max),
            self.cpu_percent + other.cpu_percent,
        )


class RunProcesses:
    """All descendants of a process, itself included.

    Args:
        root: its id: the driver, or what starts Ray's processes on this host.
        role: of that one.
    """

    def __init__(self, root: int, role: str = DRIVER):
        self._root, self._root_role = psutil.Process(root), role
        self._known: dict[int, psutil.Process] = {}
        self._roles: dict[int, str] = {}

    def sample(self) -> dict[str, RoleUse]:
        """By role; processor time since the call before, 0 for a process that was not there then.

        A process that ends meanwhile is left out.
        """
        found: dict[str, RoleUse] = {}
        known: dict[int, psutil.Process] = {}
        for process in [self._root, *self._descendants()]:
            # The one that was asked before: it counts from then. (A process is equal to another of its id only where
            # both began at the same time.)
            before = self._known.get(process.pid)
            process = before if before == process else process
            try:
                rss = process.memory_info().rss / GIB
                use = RoleUse(1, rss, rss, process.cpu_percent())
                role = self._role(process, known_before=process is before)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            known[process.pid] = process
            found[role] = found[role] + use if role in found else use
        self._known = known
        self._roles = {pid: role for pid, role in self._roles.items() if pid in known}
        return found

    def _descendants(self) -> list[psutil.Process]:
        try:
            return self._root.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _role(self, process: psutil.Process, known_before: bool) -> str:
        """Asked again while it is `OTHER`: Ray names its workers once they have something to do."""
        role = self._roles.get(process.pid) if known_before else None
        if role in (None, OTHER):
            of_root = process == self._root
            role = self._roles[process.pid] = self._root_role if of_root else role_of(process.cmdline())
        return role


def role_of(command_line: list[str]) -> str:
    """The role of a process, by its command line."""
    text = " ".join(command_line)
    return next((role for role, pattern in ROLES if re.search(pattern, text)), OTHER)
