"""The default rollout function: draws groups from the data source until enough good ones are finished.

    source ──► running ──► finished ──► filter ──► kept ──► trained
       ▲          │            │           └──► dropped (counted; may fill up at the bound on draws)
       └── aborted┘◄── surplus ┘

Invariants:
1. The output has exactly `batch_size` groups, sorted by sample index.
2. Every drawn group ends as kept, dropped, or given back to the source; `RolloutCounts` says how many of each.
3. It ends: at most `max_draws` groups are drawn.
4. Deterministic: groups are drawn in waves, decided in the order in which they were drawn, and surplus is finished
   rather than aborted. So the outcome does not depend on what finishes first. (With `--partial-rollout` too: what goes
   on later is then only what a generate function gave up.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from colloid.data.groups import Group, is_finished, is_partial
from colloid.data.sample import Status
from colloid.errors import HookError
from colloid.rollout.client import EngineClient
from colloid.rollout.context import current_context
from colloid.rollout.filters import load_filter
from colloid.rollout.group_hooks import call_group_hooks
from colloid.rollout.options import RolloutOptions, rollout_options, training_sampling
from colloid.rollout.runner import GroupRunner
from colloid.rollout.source_calls import give_back, keeps_samples, mark_consumed, take_groups
from colloid.rollout.staleness import is_stale, restart
from colloid.rollout.types import DynamicFilterOutput, RolloutCounts, RolloutFnTrainOutput

logger = logging.getLogger(__name__)

ABORT_DEADLINE = 60.0
"""Seconds for aborted groups to come back; what has not by then is cancelled."""


class GroupCollector:
    """Collects one rollout's groups.

    Args:
        dynamic_filter: of a group's samples; None: every group is kept.
        oldest_version: groups of the data source with tokens of an older one start anew; None: none is too old.

    Attributes:
        counts: what became of the groups that were drawn.
        decided: the groups that were kept or filtered, as they were decided. One that is given back is decided in a
            later rollout, so that each group is decided once.
    """

    def __init__(
        self,
        source: Any,
        runner: GroupRunner,
        client: EngineClient,
        scope,
        options: RolloutOptions,
        dynamic_filter: Callable[[Group], DynamicFilterOutput] | None = None,
        oldest_version: int | None = None,
    ):
        self._source = source
        self._runner = runner
        self._client = client
        self._scope = scope
        self._options = options
        self._filter = dynamic_filter
        self._oldest_version = oldest_version
        self._kept: list[Group] = []
        self._fillers: list[Group] = []
        self._surplus: list[Group] = []
        self._running: dict[asyncio.Task[Group], Group] = {}  # in the order of drawing
        self.counts = RolloutCounts()
        self.decided: list[Group] = []

    async def collect(self) -> list[Group]:
        """Exactly `batch_size` finished groups.

        Raises:
            HookError: the dynamic filter left too few groups, at the bound on draws.
            EngineError: see `EngineClient.generate`.
        """
        try:
            while self._missing() > 0 and self._draw():
                await self._take(wait_for_all=self._options.deterministic)
            await self._stop_running()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        self._fill()
        self._give_back()
        return sorted(self._kept, key=first_index)

    def _missing(self) -> int:
        return self._options.batch_size - len(self._kept)

    def _draw(self) -> bool:
        """Draws and starts what is missing beside what is running. False: nothing is running, nothing may be drawn."""
        missing = self._missing() - len(self._running)
        allowed = self._options.max_draws - self.counts.submitted
        if missing > 0 and allowed > 0:
            count = min(max(missing, self._options.over_sampling_batch_size or 0), allowed)
            for group in take_groups(self._source, count):
                if is_stale(group, self._oldest_version):
                    group[:] = restart(group)
                    self.counts.stale += 1
                self.counts.continued_samples += _partial_samples(group)
                self._running[asyncio.ensure_future(self._runner.run(group))] = group
                self.counts.submitted += 1
        return bool(self._running)

    async def _take(self, *, wait_for_all: bool) -> None:
        """Waits for a running group (or all), and decides about the finished ones in the order of drawing."""
        when = asyncio.FIRST_EXCEPTION if wait_for_all else asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(self._running, return_when=when)
        for task in [task for task in self._running if task in done]:
            drawn = self._running.pop(task)
            self._decide(task.result(), drawn)

    def _decide(self, group: Group, drawn: Group) -> None:
        if not is_finished(group):  # A generate function gave it up (status ABORTED).
            self.counts.aborted += 1
            self._surplus.append(group)
            return
        self.counts.finished += 1
        if self._missing() <= 0:
            self._surplus.append(group)
            return
        self.decided.append(group)
        self.counts.failed_samples += sum(sample.status is Status.FAILED for sample in group)
        verdict = DynamicFilterOutput(True) if self._filter is None else self._filter(group)
        if verdict.keep:
            self._kept.append(group)
            return
        self.counts.add_filtered(verdict.reason)
        if verdict.keep_when_insufficient and len(self._fillers) < self._options.batch_size:
            self._fillers.append(group)
        else:
            mark_consumed(self._source, [drawn])

    async def _stop_running(self) -> None:
        """Aborts what still runs (or, deterministic, lets it finish)."""
        if not self._running:
            return
        if self._options.deterministic:
            await self._take(wait_for_all=True)
            return
        unreachable = await self._client.abort(self._scope)
        self._runner.abort_grading()
        done, late = await asyncio.wait(self._running, timeout=ABORT_DEADLINE)
        if late:
            names = [first_index(self._running[task]) for task in late]
            logger.warning(
                "groups (first samples %s) did not end within %.0f s of their abort%s; they are cancelled",
                *(sorted(names), ABORT_DEADLINE, f" (engines {', '.join(unreachable)})" if unreachable else ""),
            )
        for task in done:
            group = self._running.pop(task)
            error = task.exception()
            if error is None:
                group = task.result()
            else:
                logger.warning("the group of sample %d was aborted, and ended with %r", first_index(group), error)
            finished = is_finished(group)
            self.counts.finished += finished
            self.counts.aborted += not finished
            self._surplus.append(group)
        for task in late:
            task.cancel()
            self.counts.aborted += 1
            self._surplus.append(self._running[task])

    def _fill(self) -> None:
        missing = max(self._missing(), 0)
        fillers, spare = self._fillers[:missing], self._fillers[missing:]
        mark_consumed(self._source, spare)
        if not missing:
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.counts.reasons.items()))
        what = (
            f"of {self.counts.submitted} groups the dynamic filter dropped {self.counts.filtered} ({reasons}) and "
            f"{self.counts.aborted} did not finish: {len(self._kept)} of the {self._options.batch_size} needed are left"
        )
        if len(fillers) < missing:
            raise HookError(
                f"{what}. Loosen --dynamic-sampling-filter-path, or let it set keep_when_insufficient on what may be "
                "trained nevertheless"
            )
        logger.warning("%s; dropped groups fill the batch", what)
        self.counts.filled = len(fillers)
        self._kept += fillers

    def _give_back(self) -> None:
        self._surplus.sort(key=first_index)
        if keeps_samples(self._source):
            self.counts.carried = len(self._surplus)
        else:
            self.counts.discarded = len(self._surplus)
        give_back(self._source, self._surplus)
        self.counts.partial_samples = sum(_partial_samples(group) for group in self._surplus)
        self.counts.restarted_samples = self._runner.restarted


async def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False):
    """The default of `--rollout-function-path`: `RolloutFnTrainOutput`, or with `evaluation` `RolloutFnEvalOutput`.

    Runs inside the rollout manager (`RolloutContext`).
    """
    context = current_context()
    if evaluation:
        from colloid.rollout.evaluate import evaluate_sets

        return await evaluate_sets(context, rollout_id)
    with context.client.scope() as scope:
        runner = context.runner(scope, training_sampling(args), rollout_id)
        path = args.dynamic_sampling_filter_path
        dynamic_filter = load_filter(path, args) if path else None
        options, oldest = rollout_options(args), context.versions.oldest
        collector = GroupCollector(data_source, runner, context.client, scope, options, dynamic_filter, oldest)
        groups = await collector.collect()
    decided = sorted(collector.decided, key=first_index)
    await asyncio.to_thread(call_group_hooks, args, groups, decided, data_source)
    return RolloutFnTrainOutput(groups, collector.counts.metrics())


def _partial_samples(group: Group) -> int:
    return sum(is_partial(sample) for sample in group)


def first_index(group: Group) -> int:
    """By which groups are sorted: that of the first sample."""
    index = group[0].index
    return -1 if index is None else index
