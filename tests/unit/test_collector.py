"""The group collector under random latencies, aborts, failures and filters: every drawn group ends in one place."""

from __future__ import annotations

import asyncio
import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid import DynamicFilterOutput, RolloutDataSource, RolloutDataSourceWithBuffer, Sample
from colloid.data.groups import is_finished
from colloid.data.prompts import PromptDataset, PromptRow
from colloid.errors import DataError, EngineError, HookError
from colloid.rollout.generate import GroupCollector
from colloid.rollout.options import RolloutOptions
from colloid.rollout.source_calls import mark_consumed

STATUS = Sample.Status


class FakeRunner:
    """Groups take a random number of turns of the event loop; some fail, and some are given up."""

    def __init__(self, scope, seed):
        self.scope = scope
        self.random = random.Random(seed)
        self.fail_with: Exception | None = None
        self.restarted = 0

    async def run(self, group):
        if is_finished(group):
            return list(group)
        bare = copy.deepcopy(group)
        generator = random.Random(f"{self.random.random()}")
        for _ in range(generator.randrange(12)):
            await asyncio.sleep(0)
            if self.scope.aborted and generator.random() < 0.7:
                return bare
        if generator.random() < 0.1:
            return bare
        if self.fail_with is not None and generator.random() < 0.2:
            raise self.fail_with
        for sample in group:
            sample.append_response_tokens([1], log_probs=[-0.5], weight_version=1)
            sample.status = STATUS.FAILED if generator.random() < 0.1 else STATUS.COMPLETED
            sample.reward = None if sample.status is STATUS.FAILED else float(generator.random() < 0.5)
        return list(group)

    def abort_grading(self):
        pass


class FakeClient:
    async def abort(self, scope):
        scope.aborted = True
        return []


def keep_mixed(group):
    keep = len({sample.reward for sample in group}) > 1
    return DynamicFilterOutput(keep, reason="equal", keep_when_insufficient=True)


def make_source(kind=RolloutDataSourceWithBuffer, size=7):
    rows = [PromptRow(f"p{i}", np.asarray([i], np.int32), "x", {}, i + 1) for i in range(size)]
    args = SimpleNamespace(n_samples_per_prompt=3, rollout_shuffle=True, rollout_seed=1)
    return kind(args, PromptDataset("d", rows, 0, "f"))


def collect(source, seed, batch_size=4, over=None, deterministic=False, dynamic_filter=None, fail_with=None):
    async def run():
        scope = SimpleNamespace(aborted=False)
        runner = FakeRunner(scope, seed)
        runner.fail_with = fail_with
        options = RolloutOptions(batch_size, over, deterministic, max_draws=200)
        collector = GroupCollector(source, runner, FakeClient(), scope, options, dynamic_filter)
        try:
            return await collector.collect(), collector.counts
        finally:
            assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return asyncio.run(run())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 6, 9]), st.booleans(), st.booleans())
def test_every_drawn_group_is_trained_filtered_or_waiting_exactly_once(seed, over, deterministic, filtered):
    source = make_source()
    trained, dropped = [], 0
    for rollout in range(4):
        groups, counts = collect(
            source,
            seed + rollout,
            over=over,
            deterministic=deterministic,
            dynamic_filter=keep_mixed if filtered else None,
        )
        assert len(groups) == 4 and all(is_finished(group) for group in groups)
        assert [group[0].index for group in groups] == sorted(group[0].index for group in groups)
        assert counts.submitted == len(groups) - counts.filled + counts.filtered + counts.carried
        assert not (deterministic and counts.filled)
        trained += [group[0].group_index for group in groups]
        dropped += counts.filtered - counts.filled
        mark_consumed(source, groups)
    waiting = [group[0].group_index for group in source.buffer]
    assert len(set(trained + waiting)) == len(trained) + len(waiting)
    assert len(trained) + len(waiting) + dropped == source.group_index
    assert not source.state_dict()["in_flight"]


def test_an_engine_that_dies_ends_the_rollout_and_leaves_no_task_behind():
    for seed in range(20):
        with pytest.raises(EngineError, match="gone"):
            collect(make_source(), seed, batch_size=40, fail_with=EngineError("engine gone"))


def test_groups_that_never_finish_end_the_rollout_with_their_number():
    class Never(FakeRunner):
        async def run(self, group):
            return copy.deepcopy(group)

    async def run():
        scope = SimpleNamespace(aborted=False)
        options = RolloutOptions(2, None, False, max_draws=20)
        await GroupCollector(make_source(), Never(scope, 0), FakeClient(), scope, options).collect()

    with pytest.raises(HookError, match="of 20 groups.*20 did not finish"):
        asyncio.run(run())


def test_without_a_buffer_surplus_is_gone_but_no_prompt_is_handed_out_twice():
    source = make_source(RolloutDataSource)
    seen = []
    for seed in range(3):
        groups, counts = collect(source, seed, over=9)
        seen += [group[0].group_index for group in groups]
        mark_consumed(source, groups)
        assert counts.discarded > 0 and counts.carried == 0
    assert len(set(seen)) == len(seen) and not source.state_dict()["in_flight"]


@pytest.mark.parametrize("wrong", [lambda n: [], lambda n: ["prompt"] * n, lambda n: [[]] * n])
def test_a_source_that_returns_no_groups_is_named(wrong):
    source = make_source()
    source.get_samples = wrong
    with pytest.raises(DataError, match=r"get_samples\(4\) must return 4 groups"):
        collect(source, 0)


@pytest.mark.parametrize("seed", range(20))
def test_deterministic_groups_are_decided_as_they_were_drawn_though_those_before_are_freed(seed):
    """Freed groups' addresses come again; the order must not hang on them."""
    decided = []

    def drop_most(group):
        decided.append(group[0].index)
        return DynamicFilterOutput(len(decided) > 60)

    collect(make_source(size=50), seed, batch_size=8, over=9, deterministic=True, dynamic_filter=drop_most)
    assert len(decided) > 60 and decided == sorted(decided)
