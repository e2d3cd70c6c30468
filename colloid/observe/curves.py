"""A step's utilisation as metrics: how many curves there are does not grow with the cluster.

Up to `MOST` hosts (or GPUs) each has curves of its own; above, the least, the mean and the greatest of them are told,
and the log names the host (or GPU) that stands out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colloid.observe.processes import RoleUse
from colloid.observe.utilization import HostUse

MOST = 16

STAND_OUT = (
    ("host", "cpu_percent", max, "busiest host {name} ({value:.0f}% of its processors)"),
    ("host", "memory_percent_max", max, "fullest host {name} ({value:.0f}% of its memory)"),
    ("device", "utilization", min, "idlest GPU {name} (busy {value:.0f}% of the time)"),
    ("device", "memory_percent", max, "fullest GPU {name} ({value:.0f}% of its memory)"),
)
"""What the log says of those without curves of their own."""


def utilization_metrics(uses: Sequence[HostUse]) -> dict[str, float]:
    """`perf/host/…`, `perf/device/…` and `perf/process/<role>/…` of all hosts."""
    metrics: dict[str, float] = {}
    for kind, values in _by_kind(uses).items():
        metrics |= _own(kind, values) if len(values) <= MOST else _spread(kind, values)
    for role, use in _roles(uses).items():
        metrics[f"perf/process/{role}/rss_gib"] = use.rss_gib
        metrics[f"perf/process/{role}/cpu_percent"] = use.cpu_percent
        if use.num_processes > 1:
            metrics[f"perf/process/{role}/rss_gib_max"] = use.rss_gib_max
    return metrics


def stand_outs(uses: Sequence[HostUse]) -> list[str]:
    """Names of the extremes, where there are too many hosts or GPUs for curves of their own."""
    found = []
    by_kind = _by_kind(uses)
    for kind, value, which, text in STAND_OUT:
        having = {name: values[value] for name, values in by_kind[kind].items() if value in values}
        if len(by_kind[kind]) > MOST and having:
            name = which(having, key=having.__getitem__)
            found.append(text.format(name=name, value=having[name]))
    return found


def _by_kind(uses: Sequence[HostUse]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        "host": {use.name: use.host for use in uses},
        "device": {f"{use.name}:{index}": values for use in uses for index, values in use.devices.items()},
    }


def _own(kind: str, by_name: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"perf/{kind}/{name}/{value}": number for name, of in by_name.items() for value, number in of.items()}


def _spread(kind: str, by_name: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    metrics = {}
    for value in dict.fromkeys(value for values in by_name.values() for value in values):
        numbers = [values[value] for values in by_name.values() if value in values]
        metrics[f"perf/{kind}/{value}/min"] = min(numbers)
        metrics[f"perf/{kind}/{value}/mean"] = sum(numbers) / len(numbers)
        metrics[f"perf/{kind}/{value}/max"] = max(numbers)
    return metrics


def _roles(uses: Sequence[HostUse]) -> dict[str, RoleUse]:
    roles: dict[str, RoleUse] = {}
    for use in uses:
        for role, of in use.processes.items():
            roles[role] = roles[role] + of if role in roles else of
    return roles
