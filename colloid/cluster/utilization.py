"""Utilisation of all hosts of a run: a thread here where Ray was started for the run, else an actor on each node.

A node that joins while the run goes on is found within a minute; one that does not answer in time, or is gone, is named
in the log and left out of the step's numbers.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from colloid.observe.curves import stand_outs, utilization_metrics
from colloid.observe.logs import setup_logging
from colloid.observe.processes import OTHER, RunProcesses
from colloid.observe.utilization import HostSampler, HostUse

logger = logging.getLogger(__name__)

ANSWER_DEADLINE = 10.0
NODES_EVERY = 60.0
"""Seconds between two looks at which nodes there are."""


class NodeSampler:
    """The Ray side of a `HostSampler`: of the node that it is on, and of all processes that Ray started there."""

    def __init__(self, interval: float, gpus: bool, run_dir: str):
        setup_logging(run_dir, "utilization")
        self._sampler = HostSampler(RunProcesses(os.getppid(), OTHER), interval, gpus)

    def take(self) -> HostUse:
        """What has been seen since the last call."""
        return self._sampler.take()


class Utilization:
    """Made once Ray is there. Metrics of each interval between two calls of `take`.

    Args:
        interval: seconds between two samples.
        gpus: whether the run uses GPUs.
        joined: the run has joined a cluster, which may have several nodes.
    """

    def __init__(self, interval: float, gpus: bool, run_dir: str, joined: bool):
        self._interval, self._gpus, self._run_dir = interval, gpus, run_dir
        self._local = None if joined else HostSampler(RunProcesses(os.getpid()), interval, gpus)
        self._nodes: dict[str, Any] = {}
        self._looked = float("-inf")
        self._find_nodes()

    def take(self) -> dict[str, float]:
        """`perf/host/…`, `perf/device/…`, `perf/process/…` since the call before."""
        self._find_nodes()
        uses = self._of_nodes() if self._local is None else [self._local.take()]
        for text in stand_outs(uses):
            logger.info("%s", text)
        return utilization_metrics(with_own_names(uses))

    def close(self) -> None:
        """Ends the thread; actors end with Ray."""
        if self._local is not None:
            self._local.close()

    def _find_nodes(self) -> None:
        if self._local is not None or time.monotonic() - self._looked < NODES_EVERY:
            return
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._looked = time.monotonic()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        self._nodes = {node: sampler for node, sampler in self._nodes.items() if node in alive}
        for node in sorted(alive - self._nodes.keys()):
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            sampler = ray.remote(NodeSampler).options(num_cpus=0, scheduling_strategy=here)
            self._nodes[node] = sampler.remote(self._interval, self._gpus, self._run_dir)

    def _of_nodes(self) -> list[HostUse]:
        import ray

        asked = {sampler.take.remote(): node for node, sampler in self._nodes.items()}
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_DEADLINE)
        uses, lost = [], [asked[reference] for reference in late]
        for reference in done:
            try:
                uses.append(ray.get(reference))
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
                lost.append(asked[reference])
                self._looked = float("-inf")  # where the node is alive, it gets another one
                del self._nodes[asked[reference]]
        if lost:
            logger.warning(
                "no utilisation of the nodes %s: gone, or no answer in %.0f s", ", ".join(lost), ANSWER_DEADLINE
            )
        return uses


def with_own_names(uses: list[HostUse]) -> list[HostUse]:
    """Hosts of the same name (several nodes on a machine) get a number."""
    seen: dict[str, int] = {}
    for use in sorted(uses, key=lambda use: use.name):
        seen[use.name] = seen.get(use.name, 0) + 1
        if seen[use.name] > 1:
            use.name = f"{use.name}-{seen[use.name]}"
    return uses
