"""Utilisation of one host while a run goes on: processors, memory, disks, network, GPUs, and the run's processes.

A thread looks every few seconds; `take` hands over what it has seen since the last time, and begins anew. So a step's
numbers are of that step, however long it is.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from colloid.observe.devices import GIB, MIB, Devices, open_devices
from colloid.observe.processes import RoleUse, RunProcesses

logger = logging.getLogger(__name__)


@dataclass
class HostUse:
    """A host in an interval. Mean values; `…_max` are the largest that were seen.

    Attributes:
        host: `cpu_percent` (of all cores), `memory_percent`, `memory_gib`, and MiB/s of `disk_read`, `disk_write`,
            `network_received` and `network_sent`.
        devices: of each GPU, by index; see `Devices.sample`.
        processes: by role.
    """

    name: str
    host: dict[str, float] = field(default_factory=dict)
    devices: dict[str, dict[str, float]] = field(default_factory=dict)
    processes: dict[str, RoleUse] = field(default_factory=dict)


class HostSampler:
    """Samples this host until it is closed.

    Args:
        processes: the run's on this host; None: none is looked at.
        interval: seconds between two samples.
        gpus: whether the run uses GPUs.
        name: of the host; None: its own.
        devices: where its GPUs are known already.
    """

    def __init__(
        self,
        processes: RunProcesses | None,
        interval: float,
        gpus: bool,
        name: str | None = None,
        devices: Devices | None = None,
    ):
        self.name = name or socket.gethostname()
        self._interval = interval
        self._processes = processes
        self._devices = devices or open_devices(gpus)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._begin()
        self._thread = threading.Thread(target=self._run, name="utilization", daemon=True)
        self._thread.start()

    def take(self) -> HostUse:
        """What has been seen since the last call, up to now."""
        with self._lock:
            self._look()
            use = self._means.result(self.name)
            self._means = _Means()
            return use

    def close(self) -> None:
        """Ends the thread. A second call does nothing."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(timeout=60)
            if self._devices is not None:
                self._devices.close()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            with self._lock:
                self._look()

    def _begin(self) -> None:
        self._means = _Means()
        self._at = time.monotonic()
        psutil.cpu_percent()  # the first call has no interval to tell of
        self._counters = _counters()
        if self._processes is not None:
            self._processes.sample()

    def _look(self) -> None:
        now, counters = time.monotonic(), _counters()
        seconds = max(now - self._at, 1e-3)
        memory = psutil.virtual_memory()
        host = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_percent": memory.percent,
            "memory_gib": (memory.total - memory.available) / GIB,
        }
        rates = {name: (count - self._counters.get(name, count)) / seconds / MIB for name, count in counters.items()}
        devices = {} if self._devices is None else self._devices.sample()
        processes = {} if self._processes is None else self._processes.sample()
        self._means.add(seconds, host | rates, devices, processes)
        self._at, self._counters = now, counters


def _counters() -> dict[str, int]:
    """Bytes since the host began, as far as it tells."""
    disk, network = _told(psutil.disk_io_counters), _told(psutil.net_io_counters)
    counters = {}
    if disk is not None:
        counters |= {"disk_read_mib_per_sec": disk.read_bytes, "disk_write_mib_per_sec": disk.write_bytes}
    if network is not None:
        received, sent = network.bytes_recv, network.bytes_sent
        counters |= {"network_received_mib_per_sec": received, "network_sent_mib_per_sec": sent}
    return counters


def _told(ask: Callable[[], Any]) -> Any:
    """None where the system does not tell (in some containers there is no /proc/diskstats)."""
    try:
        return ask()
    except (NotImplementedError, OSError, RuntimeError) as error:
        logger.debug("%s: %s", ask.__name__, error)
        return None


MAXIMA = ("cpu_percent", "memory_percent", "utilization", "memory_gib")
"""Values whose largest is told too: between two samples' means it is what runs out."""


class _Means:
    """Means over time of what was sampled."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], float] = {}
        self._weights: dict[tuple[str, str, str], float] = {}
        self._largest: dict[tuple[str, str, str], float] = {}
        self._counts: dict[str, tuple[int, float]] = {}

    def add(
        self, seconds: float, host: dict[str, float], devices: dict[str, dict[str, float]], roles: dict[str, RoleUse]
    ) -> None:
        """A sample that stands for so many seconds."""
        groups = [("host", "", host), *(("device", index, values) for index, values in devices.items())]
        for kind, owner, values in groups:
            for name, value in values.items():
                self._add((kind, owner, name), value, seconds)
        for role, use in roles.items():
            self._add(("process", role, "cpu_percent"), use.cpu_percent, seconds)
            self._add(("process", role, "rss_gib"), use.rss_gib, seconds)
            count, largest = self._counts.get(role, (0, 0.0))
            self._counts[role] = max(count, use.num_processes), max(largest, use.rss_gib_max)

    def result(self, name: str) -> HostUse:
        """The host's numbers."""
        use = HostUse(name)
        means = {key: total / self._weights[key] for key, total in self._sums.items()}
        for (kind, owner, value), mean in means.items():
            if kind == "process":
                continue
            values = use.host if kind == "host" else use.devices.setdefault(owner, {})
            values[value] = mean
            if value in MAXIMA:
                values[f"{value}_max"] = self._largest[kind, owner, value]
        for role, (count, largest) in self._counts.items():
            rss, cpu = (means["process", role, value] for value in ("rss_gib", "cpu_percent"))
            use.processes[role] = RoleUse(count, rss, largest, cpu)
        return use

    def _add(self, key: tuple[str, str, str], value: float, seconds: float) -> None:
        self._sums[key] = self._sums.get(key, 0.0) + value * seconds
        self._weights[key] = self._weights.get(key, 0.0) + seconds
        self._largest[key] = max(self._largest.get(key, value), value)
