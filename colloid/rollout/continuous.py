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
4. It ends: between two hand-outs the filter drops, and generate functions give up, at most `MAX_DRAWS` batches each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colloid.data.groups import Group, flatten, is_finished
from colloid.data.sample import Status
from colloid.errors import HookError
from colloid.rollout.client import EngineClient
from colloid.rollout.context import RolloutContext, current_context
from colloid.rollout.filters import load_filter
from colloid.rollout.generate import first_index
from colloid.rollout.group_hooks import call_group_hooks
from colloid.rollout.options import MAX_DRAWS, training_sampling
from colloid.rollout.runner import GroupRunner
from colloid.rollout.scopes import RequestScope
from colloid.rollout.source_calls import mark_consumed, take_groups
from colloid.rollout.staleness import Versions, is_stale, oldest_version, restart
from colloid.rollout.types import DynamicFilterOutput, RolloutCounts, RolloutFnTrainOutput

STREAM = "continuous"
"""Its name among what a context keeps between rollouts."""


@dataclass
class _Running:
    """A group that is being made."""

    group: Group
    """As it was drawn."""
    started_at: int | None
    """The oldest version that its tokens can have; None: unknown."""
    scope: RequestScope | None = None
    """Of its requests; None: it has not begun."""


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
        self._running: dict[asyncio.Task[Group], _Running] = {}
        self._ready: list[Group] = []
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self._next = versions.rollout_id
        self._given_up = 0
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
            HookError: since the last hand-out the dynamic filter dropped, or generate functions gave up, `MAX_DRAWS`
                times as many; or a hook cancelled its group.
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
        self._ready.sort(key=first_index)
        taken, self._ready = self._ready[: self._batch_size], self._ready[self._batch_size :]
        self.counts.carried = self.num_outstanding
        self._next += 1
        self._given_up = 0
        self._fill()
        return taken

    def weights_updated(self) -> None:
        """The engines hold a newer version: groups may be started that would have been too old before."""
        try:
            self._fill()
        except BaseException as error:
            self._fail(error)

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
        running = _Running(group, min((version for version in known if version is not None), default=None))
        task = asyncio.ensure_future(self._run(running))
        self._running[task] = running
        task.add_done_callback(self._on_end)

    async def _run(self, running: _Running) -> Group:
        with self._client.scope() as running.scope:
            return await self._make_runner(running.scope).run(running.group)

    def _on_end(self, task: asyncio.Task[Group]) -> None:
        ended = self._running.pop(task)
        if self._closed:
            return
        try:
            if task.cancelled():  # by nothing here, and without a word `take` might wait for it for ever
                raise HookError(
                    f"the group of sample {first_index(ended.group)} was cancelled by one of its hooks: it raised "
                    "asyncio.CancelledError, or let one pass"
                )
            self._decide(task.result(), ended)
            self._fill()
        except BaseException as error:
            self._fail(error)
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        """The first failure is raised where somebody waits: in `take`."""
        self._failure = self._failure or error
        self._changed.set()

    def _decide(self, group: Group, ended: _Running) -> None:
        drawn = ended.group
        if not is_finished(group):
            self.counts.aborted += 1
            if not ended.scope.aborted:  # else it was stopped for being too old
                self._count_given_up()
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
        self.counts.add_filtered(verdict.reason)
        mark_consumed(self._source, [drawn])

    def _count_given_up(self) -> None:
        self._given_up += 1
        if self._given_up >= MAX_DRAWS * self._batch_size:
            raise HookError(
                f"{self._given_up} times since the last rollout was handed out a group ended with samples that were "
                f"given up (status ABORTED), and {len(self._ready)} of the {self._batch_size} needed are ready. Let "
                "the generate function (--custom-generate-function-path) set ABORTED only where an answer was cut "
                'short (finish_reason "abort"), and FAILED where a sample cannot be made'
            )

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
        for running in list(self._running.values()):
            started, scope = running.started_at, running.scope
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
    counts, decided = stream.counts, sorted(stream.decided, key=first_index)
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
