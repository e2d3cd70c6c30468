"""The rollout function that never waits for a whole batch: `--rollout-function-path` of fully asynchronous training.

    source ──► running ──► filter ──► ready ──► the next rollout: the `batch_size` oldest
       ▲ (as soon as there is room)      │
       └── too old to be trained ◄───────┘  starts anew

Groups run all the time, whoever trains, evaluates or updates weights meanwhile; there is no end of a rollout at which
engines wait for the longest response.

Invariants:
1. A group is started only if its tokens may still be trained when its turn comes: just after a weight update up to
   `--max-staleness` + 1 batches are running or ready, and one less for each rollout that waits for the trainer. So
   nothing is born stale.
2. A group with tokens older than `--max-staleness` allows is never handed out: it starts anew, counted. One that runs
   with them is stopped for that, not finished in vain.
3. Each drawn group is ready, running, handed out, or dropped by the filter: and in flight for the data source until
   then, so that a checkpoint holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from colloid.data.groups import Group, flatten, is_finished
from colloid.data.sample import Status
from colloid.errors import HookError
from colloid.rollout.client import EngineClient, RequestScope
from colloid.rollout.context import RolloutContext, current_context
from colloid.rollout.filters import load_filter
from colloid.rollout.group_hooks import call_group_hooks
from colloid.rollout.options import MAX_DRAWS, training_sampling
from colloid.rollout.runner import GroupRunner
from colloid.rollout.source_calls import mark_consumed, take_groups
from colloid.rollout.staleness import Versions, is_stale, oldest_version, restart
from colloid.rollout.types import DynamicFilterOutput, RolloutCounts, RolloutFnTrainOutput

STREAM = "continuous"
"""Its name among what a context keeps between rollouts."""


class GroupStream:
    """Groups that are made in the background, in the event loop of the manager.

    Args:
        make_runner: a runner of the groups of a scope.
        batch_size: groups that are handed out at a time.
        versions: of the engines, and of the rollout that takes next.
        dynamic_filter: of a group's samples; None: every group is kept.

    Attributes:
        counts, decided: what became of groups since the last hand-out, as of `GroupCollector`.
    """

    def __init__(
        self,
        source: Any,
        client: EngineClient,
        make_runner: Callable[[RequestScope], GroupRunner],
        *,
        batch_size: int,
        versions: Versions,
        dynamic_filter: Callable[[Group], DynamicFilterOutput] | None = None,
    ):
        self._source = source
        self._client = client
        self._make_runner = make_runner
        self._batch_size = batch_size
        self._versions = versions
        self._filter = dynamic_filter
        self._running: dict[asyncio.Task[Group], Group] = {}
        self._scopes: dict[int, RequestScope] = {}
        self._started_at: dict[int, int | None] = {}
        self._ready: list[Group] = []
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self._next = versions.rollout_id
        self.counts = RolloutCounts()
        self.decided: list[Group] = []

    @property
    def capacity(self) -> int:
        """Groups that may be running or ready now."""
        return self._versions.batches_ahead(self._next) * self._batch_size

    @property
    def num_outstanding(self) -> int:
        """Groups that are running or ready."""
        return len(self._running) + len(self._ready)

    async def take(self) -> list[Group]:
        """The next `batch_size` groups that are ready, the oldest first, when there are as many.

        Raises:
            HookError: the dynamic filter dropped `MAX_DRAWS` times as many since the last hand-out.
            EngineError: see `EngineClient.generate`.
        """
        self._next = self._versions.rollout_id
        await self._restart_stale()
        self._fill()
        while len(self._ready) < self._batch_size:
            if self._failure is not None:
                raise self._failure
            if self.counts.filtered >= MAX_DRAWS * self._batch_size:
                raise HookError(
                    f"the dynamic filter dropped {self.counts.filtered} groups while {len(self._ready)} of the "
                    f"{self._batch_size} needed were kept. Loosen --dynamic-sampling-filter-path"
                )
            self._changed.clear()
            await self._changed.wait()
        self._ready.sort(key=_first_index)
        taken, self._ready = self._ready[: self._batch_size], self._ready[self._batch_size :]
        self.counts.carried = self.num_outstanding
        self._next += 1
        self._fill()
        return taken

    def weights_updated(self) -> None:
        """The engines hold a newer version: groups may be started that would have been too old before."""
        try:
            self._fill()
        except BaseException as error:  # raised where somebody waits: in `take`
            self._failure = error
            self._changed.set()

    async def close(self) -> None:
        """Ends all that is running."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _fill(self) -> None:
        """Starts as many groups as there is room for."""
        while self.num_outstanding < self.capacity and not self._closed and self._failure is None:
            (group,) = take_groups(self._source, 1)
            if is_stale(group, self._versions.oldest):
                group[:] = restart(group)
                self.counts.stale += 1
            self.counts.submitted += 1
            self._start(group)

    def _start(self, group: Group) -> None:
        known = [self._versions.engines, *(oldest_version(sample) for sample in flatten(group))]
        self._started_at[id(group)] = min((version for version in known if version is not None), default=None)
        task = asyncio.ensure_future(self._run(group))
        self._running[task] = group
        task.add_done_callback(self._on_end)

    async def _run(self, group: Group) -> Group:
        with self._client.scope() as scope:
            self._scopes[id(group)] = scope
            return await self._make_runner(scope).run(group)

    def _on_end(self, task: asyncio.Task[Group]) -> None:
        drawn = self._running.pop(task)
        self._scopes.pop(id(drawn), None)
        self._started_at.pop(id(drawn), None)
        if self._closed or task.cancelled():
            return
        try:
            self._decide(task.result(), drawn)
            self._fill()
        except BaseException as error:  # raised where somebody waits: in `take`
            self._failure = error
        self._changed.set()

    def _decide(self, group: Group, drawn: Group) -> None:
        if not is_finished(group):  # It was stopped for being too old, or a generate function gave it up.
            self.counts.aborted += 1
            self._restart(group, drawn)
            return
        if is_stale(group, self._versions.oldest):  # It had ended when it was to be stopped, and was then judged.
            self.counts.stale += 1
            self._restart(group, drawn)
            return
        self.counts.finished += 1
        self.counts.failed_samples += sum(sample.status is Status.FAILED for sample in group)
        self.decided.append(group)
        verdict = DynamicFilterOutput(True) if self._filter is None else self._filter(group)
        if verdict.keep:
            self._ready.append(group)
            return
        self.counts.filtered += 1
        reason = verdict.reason or "filtered"
        self.counts.reasons[reason] = self.counts.reasons.get(reason, 0) + 1
        mark_consumed(self._source, [drawn])

    def _restart(self, group: Group, drawn: Group) -> None:
        drawn[:] = restart(group)
        self._start(drawn)

    async def _restart_stale(self) -> None:
        """What would be too old for the rollout that takes now starts anew."""
        oldest = self._versions.oldest
        stale = [group for group in self._ready if is_stale(group, oldest)]
        for kept in (self._ready, self.decided):  # it will be decided anew
            kept[:] = [group for group in kept if not any(group is one for one in stale)]
        self.counts.stale += len(stale)
        for group in stale:
            self._restart(group, group)
        for group in list(self._running.values()):
            started = self._started_at.get(id(group))
            scope = self._scopes.get(id(group))
            if None not in (oldest, started, scope) and started < oldest and not scope.aborted:
                self.counts.stale += 1
                await self._client.abort(scope)


async def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False):
    """A rollout function for `train_async.py`: the groups that are ready by now, see the top of the file."""
    context = current_context()
    if evaluation:
        from colloid.rollout.evaluate import evaluate_sets

        return await evaluate_sets(context, rollout_id)
    stream = context.kept.get(STREAM) or context.kept.setdefault(STREAM, _make_stream(context, data_source))
    groups = await stream.take()
    counts, decided = stream.counts, sorted(stream.decided, key=_first_index)
    stream.counts, stream.decided = RolloutCounts(), []
    await asyncio.to_thread(call_group_hooks, args, groups, decided, data_source)
    return RolloutFnTrainOutput(groups, counts.metrics())


def _make_stream(context: RolloutContext, source: Any) -> GroupStream:
    args, path = context.args, context.args.dynamic_sampling_filter_path
    sampling = training_sampling(args)
    return GroupStream(
        source,
        context.client,
        lambda scope: context.runner(scope, sampling, 0),
        batch_size=args.rollout_batch_size,
        versions=context.versions,
        dynamic_filter=load_filter(path, args) if path else None,
    )


def _first_index(group: Group) -> int:
    index = group[0].index
    return -1 if index is None else index
