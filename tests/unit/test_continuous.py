"""The continuous rollout in virtual time: nothing too old is handed out, and each prompt is trained, filtered or
waiting exactly once, whatever is slow, stuck, broken, filtered or stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter

import pytest

from colloid.data.groups import is_finished
from colloid.data.sample import Sample, Status
from colloid.errors import EngineError, HookError
from colloid.rollout.continuous import GroupStream
from colloid.rollout.options import MAX_DRAWS, SamplingOptions
from colloid.rollout.runner import GroupRunner
from colloid.rollout.staleness import Versions, is_stale, oldest_version
from tests.fake_client import FakeClient
from tests.unit.test_partial_rollout import BUDGET, FakeGrader, Tokenizer, keep_mixed, make_source
from tests.virtual_time import VirtualTimeLoop

BATCHES = 6


class ScopedClient(FakeClient):
    """As the fake, for several scopes at once."""

    @property
    def current(self):
        from colloid.rollout.scopes import SCOPE

        return SCOPE.get()

    @current.setter
    def current(self, scope):
        pass

    async def abort(self, scope):
        scope.aborted = True
        for waiting in self.waiting:
            if waiting.scope is scope and not waiting.done():
                waiting.set_result(None)
        return []

    async def _wait(self, seconds):
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop=loop)
        waiting.scope = self.current
        timer = loop.call_later(seconds, lambda: waiting.done() or waiting.set_result(None))
        self.waiting.add(waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            self.waiting.discard(waiting)


class _Waiting(asyncio.Future):
    scope = None


class Training:
    """Takes, trains for a while, updates the weights; now and then goes back to a checkpoint."""

    def __init__(self, seed):
        chance = self.chance = random.Random(seed)
        self.seed = seed
        self.batch = chance.choice((1, 2, 3))
        self.bound = chance.choice((1, 1, 2, 3))
        self.filter = keep_mixed if chance.random() < 0.25 else None
        fates = {"fail": 0.003, "refuse": 0.05} if chance.random() < 0.3 else {}
        self.client = ScopedClient(seed, **fates)
        self.grader = FakeGrader(seed, fail=0.1 if fates else 0.0)
        self.source = make_source(False)
        self.versions = Versions(engines=1, max_staleness=self.bound)
        self.client.weight_version = 1
        self.trained: list[int] = []
        self.filtered: list[int] = []
        self.restarted = 0

    def stream(self):
        sampling = SamplingOptions({}, BUDGET, None, False, self.seed)

        def runner(scope):
            return GroupRunner(self.client, Tokenizer(), self.grader, sampling, scope, rollout_id=0)

        return GroupStream(
            *(self.source, self.client, runner),
            batch_size=self.batch,
            versions=self.versions,
            dynamic_filter=self.filter,
        )

    async def run(self):
        stream, saved = self.stream(), None
        for step in range(BATCHES):
            self.versions.trained, self.versions.rollout_id = self.versions.engines, step
            assert stream.num_outstanding <= stream.capacity
            groups = await stream.take()
            assert len(groups) == self.batch and all(is_finished(group) for group in groups)
            for sample in (sample for group in groups for sample in group):
                version = oldest_version(sample)
                assert version is None or self.versions.trained - version <= self.bound
            self.trained += [group[0].group_index for group in groups]
            taken = {group[0].group_index for group in groups}
            self.filtered += [g[0].group_index for g in stream.decided if not _kept(self.filter, g)]
            stream.decided = []
            self.source.mark_consumed(groups)
            await asyncio.sleep(self.chance.expovariate(0.2))
            assert stream.num_outstanding <= stream.capacity and taken
            self.restarted += stream.counts.stale
            self.versions.engines += 1
            self.client.weight_version += 1
            stream.weights_updated()
            assert stream.num_outstanding <= stream.capacity
            if step == 2 and self.chance.random() < 0.5:
                saved = json.dumps(self.source.state_dict()), list(self.trained), list(self.filtered)
                # What the filter dropped by now, and nobody asked for yet, is gone from the state too.
                saved[2].extend(g[0].group_index for g in stream.decided if not _kept(self.filter, g))
            if step == 4 and saved:
                await stream.close()
                self.source = make_source(False)
                self.source.load_state_dict(json.loads(saved[0]))
                self.trained, self.filtered = list(saved[1]), list(saved[2])
                stream, saved = self.stream(), None
        self.filtered += [g[0].group_index for g in stream.decided if not _kept(self.filter, g)]
        await stream.close()

    def check(self):
        state = self.source.state_dict()
        waiting = [group[0]["group_index"] for part in ("in_flight", "returned", "buffer") for group in state[part]]
        seen = Counter([*self.trained, *self.filtered, *waiting])
        assert seen == Counter(range(self.source.group_index)), "each prompt once"


def _kept(dynamic_filter, group):
    return dynamic_filter is None or dynamic_filter(group).keep


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("schedules", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_each_prompt_is_trained_filtered_or_waiting_once_and_nothing_is_too_old(schedules):
    logging.disable(logging.WARNING)
    loop = VirtualTimeLoop()
    ended, restarted = Counter(), 0
    try:
        for seed in range(schedules):
            training = Training(seed)
            try:
                loop.run_until_complete(training.run())
            except (EngineError, HookError) as error:
                ended[type(error).__name__] += 1
            else:
                training.check()
                ended["trained"] += 1
            restarted += training.restarted
            _cancel_all(loop)
    finally:
        logging.disable(logging.NOTSET)
        loop.close()
    assert ended["trained"] > 0.8 * schedules and ended["EngineError"] > 0, ended
    assert restarted > 0.1 * schedules, "nothing was ever too old: the test shows nothing"


def _cancel_all(loop):
    async def ended(tasks):
        await asyncio.gather(*tasks, return_exceptions=True)

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(ended(tasks))


def test_a_failure_in_the_background_is_raised_where_the_next_rollout_waits():
    training = Training(0)
    training.client.fail = 1.0
    loop = VirtualTimeLoop()
    try:
        with pytest.raises(EngineError, match="engine gone under sample"):
            loop.run_until_complete(training.run())
    finally:
        _cancel_all(loop)
        loop.close()


class GivesUp:
    """Groups come back unfinished, until `left` is used up; a stop by the stream costs nothing of it."""

    def __init__(self, left, cancels=False):
        self.left, self.cancels, self.runs = left, cancels, 0

    def of(self, scope):
        self.scope = scope
        return self

    async def run(self, group):
        self.runs += 1
        await asyncio.sleep(0.1)
        if self.cancels:
            raise asyncio.CancelledError
        self.left -= 1
        if self.left < 0:
            for sample in group:
                sample.status, sample.reward = Status.COMPLETED, 1.0
        return list(group)


def take_from(runner, batches=1):
    """What `batches` hand-outs of 2 groups give."""
    loop = VirtualTimeLoop()

    async def run():
        versions = Versions(engines=1, trained=1, max_staleness=1)
        stream = GroupStream(make_source(False), ScopedClient(0), runner.of, batch_size=2, versions=versions)
        try:
            found = []
            for versions.rollout_id in range(batches):
                found.append(await stream.take())
                versions.trained = versions.engines = versions.engines + 1
                stream.weights_updated()
            return found
        finally:
            await stream.close()

    try:
        return loop.run_until_complete(run())
    finally:
        _cancel_all(loop)
        loop.close()


def test_groups_that_are_always_given_up_end_the_run_with_their_number():
    runner = GivesUp(10**6)
    with pytest.raises(HookError, match=r"20 times since .* given up \(status ABORTED\), and 0 of the 2 needed"):
        take_from(runner)
    assert runner.runs <= 2 * 2 * MAX_DRAWS


def test_groups_that_are_given_up_now_and_then_are_made_anew():
    assert len(take_from(GivesUp(2 * MAX_DRAWS - 1), batches=4)) == 4


def test_a_group_that_is_stopped_for_its_age_is_not_counted_as_given_up():
    class Stopped(GivesUp):
        async def run(self, group):
            self.scope.aborted = True
            return await super().run(group)

    assert len(take_from(Stopped(5 * MAX_DRAWS))) == 1


def test_a_hook_that_cancels_its_group_is_named_rather_than_waited_for():
    with pytest.raises(HookError, match="group of sample 0 was cancelled by one of its hooks"):
        take_from(GivesUp(0, cancels=True))


class Steady(ScopedClient):
    """Every request takes the same time."""

    async def _wait(self, seconds):
        await super()._wait(0.05)


@pytest.mark.parametrize(("bound", "ahead", "interval"), [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 2, 2), (3, 3, 2)])
def test_nothing_is_born_too_old_and_capacity_is_used(bound, ahead, interval):
    """Rollouts are taken `ahead` of the trainer, which is slow: all that may be started is finished, and waits."""
    loop = VirtualTimeLoop()
    training = Training(0)
    training.client, training.batch, training.filter = Steady(0), 2, None
    training.client.weight_version, training.grader.grade = 1, _judge
    versions = training.versions = Versions(engines=1, max_staleness=bound, interval=interval)
    started = []

    async def run():
        stream, taken = training.stream(), {}
        for trained in range(12):
            for rollout_id in range(len(taken), trained + ahead + 1):
                age = rollout_id // interval - trained // interval
                if age > bound:
                    break
                versions.trained, versions.rollout_id = versions.engines + age, rollout_id
                taken[rollout_id] = versions.trained, await stream.take()
            version, groups = taken[trained]
            assert version == versions.engines
            ages = [version - oldest_version(sample) for group in groups for sample in group]
            started.append(max(ages))
            await asyncio.sleep(50.0)
            held = len(taken) - trained - 1 + stream.num_outstanding / training.batch
            assert held == (bound + 1) * interval - 1 - trained % interval, "batches beside the one that is trained"
            if (trained + 1) % interval == 0:
                versions.engines += 1
                training.client.weight_version = versions.engines
                stream.weights_updated()
        await stream.close()
        return stream.counts.stale

    try:
        assert loop.run_until_complete(run()) == 0
    finally:
        _cancel_all(loop)
        loop.close()
    assert max(started) == bound, "as old as may be, and no older"


async def _judge(sample, reward_key=None):
    sample.reward = 1.0


def test_a_samples_age_is_that_of_what_is_trained_of_it_and_unknown_without_versions():
    sample = Sample(tokens=[1, 2, 3, 4, 5], response_length=4, weight_versions=[2, -1, 3, 4])
    assert oldest_version(sample) == 2
    sample.loss_mask = [0, 1, 1, 1]
    assert oldest_version(sample) == 3 and is_stale([sample], 4) and not is_stale([[sample]], 3)
    sample.loss_mask = [0, 1, 0, 0]
    assert oldest_version(sample) is None
    by_hand = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 0])
    assert oldest_version(by_hand) is None and not is_stale([by_hand], 4)
