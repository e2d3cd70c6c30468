"""Trainer and engines have the memory in turns: what one holds during its turn, the other has given back.

    rollout ──to_training──► training ──to_update──► update ──to_rollout──► rollout
    engines hold all         trainer holds all       engines hold weights   engines hold all

So at any time there is what one of the two needs, and while weights are sent one model in the engines and a bucket on
its way: the trainer's ranks read them from where they have put them. Where an update does not follow, the engines keep
their weights, which nothing would bring back, and give back only their caches.

What the options leave in its place is not moved; how much memory the processes hold in each phase is noted either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from colloid.engines.contract_memory import KV_CACHE, WEIGHTS
from colloid.observe.resident import Resident

Wait = Callable[[list[Any], str], list[Any]]
"""(Ray references, what is waited for) -> their values."""

GIB = 2**30


class MemoryTurns:
    """The turns of a run.

    Args:
        rollout: the actor that owns the engines.
        roles: (name in the metrics, the actors of the trainer's ranks), of policy and critic.
        offload_train, offload_rollout: who gives memory back.
    """

    def __init__(
        self,
        wait: Wait,
        rollout: Any,
        roles: Sequence[tuple[str, list[Any]]],
        *,
        offload_train: bool,
        offload_rollout: bool,
    ):
        self._wait, self._rollout, self._roles = wait, rollout, roles
        self._offload_train, self._offload_rollout = offload_train, offload_rollout
        self._phase = "training"
        self._metrics: dict[str, float] = {}
        self._seconds = 0.0

    def begin(self) -> None:
        """The engines serve, and the trainer's ranks have not built their models yet: it is their turn to."""
        if self._offload_rollout:
            self._engines("release", (WEIGHTS, KV_CACHE))

    def to_training(self, *, update_follows: bool) -> None:
        """The engines give their memory back; the trainer takes its own.

        Args:
            update_follows: whether a weight update comes before the engines generate again.
        """
        if self._phase == "training":
            return
        self._measure()
        if self._offload_rollout:
            self._engines("release", (WEIGHTS, KV_CACHE) if update_follows else (KV_CACHE,))
        if self._offload_train:
            self._trainer("resume", "the trainer to take its memory")
        self._enter("training")

    def to_update(self) -> None:
        """The trainer gives its memory back; the engines take that of the weights, which are to be sent."""
        if self._phase != "training":
            return
        self._measure()
        if self._offload_train:
            self._trainer("offload", "the trainer to give its memory back")
        if self._offload_rollout:
            self._engines("resume", (WEIGHTS,))
        self._enter("update")

    def to_rollout(self) -> None:
        """The engines take the rest of their memory."""
        self.to_update()
        if self._phase == "update":
            self._measure()
            if self._offload_rollout:
                self._engines("resume", (KV_CACHE,))
            self._enter("rollout")

    def metrics(self) -> dict[str, float]:
        """`perf/memory/<phase>/<role>_rss_gib` at the end of each phase since the last call, and `…_rss_peak_gib`
        during it: sums over the processes of a role. `perf/offload_time`: seconds of handing memory over.
        """
        metrics, self._metrics = self._metrics, {}
        if self._offload_train or self._offload_rollout:
            metrics["perf/offload_time"], self._seconds = self._seconds, 0.0
        return metrics

    def _enter(self, phase: str) -> None:
        """What was held before the phase is not its peak."""
        self._phase = phase
        if self._offload_train or self._offload_rollout:
            self._resident()

    def _measure(self) -> None:
        for role, size in self._resident():
            if size.now:
                for what, number in (("rss", size.now), ("rss_peak", size.peak)):
                    name = f"perf/memory/{self._phase}/{role}_{what}_gib"
                    self._metrics[name] = self._metrics.get(name, 0.0) + number / GIB

    def _resident(self) -> list[tuple[str, Resident]]:
        """(role, its size) of all processes; their peaks begin anew."""
        named = [(role, worker.resident.remote()) for role, workers in self._roles for worker in workers]
        named.append(("engine", self._rollout.engines_resident.remote()))
        sizes = self._wait([reference for _, reference in named], "the size of processes")
        return [(role, size) for (role, _), size in zip(named, sizes, strict=True)]

    def _trainer(self, verb: str, what: str) -> None:
        self._hand_over([getattr(worker, verb).remote() for _, workers in self._roles for worker in workers], what)

    def _engines(self, verb: str, tags: Sequence[str]) -> None:
        call = self._rollout.release_memory if verb == "release" else self._rollout.resume_memory
        self._hand_over([call.remote(list(tags))], f"the engines to {verb} memory ({', '.join(tags)})")

    def _hand_over(self, references: list[Any], what: str) -> None:
        begin = time.monotonic()
        self._wait(references, what)
        self._seconds += time.monotonic() - begin
