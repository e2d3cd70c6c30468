"""Random schedules of rollouts in virtual time: each prompt is trained, filtered or waiting exactly once, and a sample
that goes on has every token once, in its place, with its log-prob and weight version, within its budget."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from colloid import DynamicFilterOutput, RolloutDataSourceWithBuffer, Sample
from colloid.data.groups import is_finished
from colloid.data.rows import PromptDataset, PromptRow
from colloid.errors import EngineError, HookError
from colloid.rollout.generate import GroupCollector
from colloid.rollout.generate_sample import record_answer
from colloid.rollout.options import PartialOptions, RolloutOptions, SamplingOptions
from colloid.rollout.runner import GroupRunner
from colloid.rollout.source_calls import mark_consumed
from tests.fake_client import PROMPT_LENGTH, FakeClient, draw, log_prob_of, token_at
from tests.virtual_time import VirtualTimeLoop

STATUS = Sample.Status
BUDGET = 8
GROUP = 2
PROMPTS = 5
SCHEDULES = 10_000


class FakeGrader:
    """Judges in virtual time; some judgements fail."""

    whole_groups = False

    def __init__(self, seed, fail=0.0):
        self.seed, self.fail = seed, fail
        self.whole_groups = False

    async def grade(self, sample, reward_key=None):
        if sample.status is STATUS.FAILED or sample.reward is not None:
            return
        if (wait := draw(self.seed, sample.index, 11) - 0.6) > 0:
            await asyncio.sleep(wait * 20)
        if draw(self.seed, sample.index, 12) < self.fail:
            self.mark_failed(sample, "judge", ValueError("no"))
        else:
            sample.reward = float(draw(self.seed, sample.index, 13) < 0.5)

    def mark_failed(self, sample, culprit, error, traceback=""):
        sample.status, sample.reward = STATUS.FAILED, None


class Tokenizer:
    all_special_ids = ()
    eos_token_id = None
    added_tokens_decoder: dict = {}
    chat_template = None

    def convert_tokens_to_ids(self, tokens):
        return []

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def make_source(partial, kind=RolloutDataSourceWithBuffer):
    rows = [PromptRow(f"p{i}", np.asarray([1, i], np.int32), "x", {}, i + 1) for i in range(PROMPTS)]
    args = SimpleNamespace(n_samples_per_prompt=GROUP, rollout_shuffle=False, rollout_seed=1, partial_rollout=partial)
    return kind(args, PromptDataset("d", rows, 0, "f"))


def keep_mixed(group):
    keep = len({sample.reward for sample in group}) > 1
    return DynamicFilterOutput(keep, reason="equal", keep_when_insufficient=True)


class Turns:
    """A user's generate function, in as many turns as the response takes with up to 3 tokens each."""

    def __init__(self, client, careless):
        self.client, self.careless = client, careless

    async def __call__(self, sample, sampling_params, evaluation=False):
        turn = 0
        while sample.response_length < BUDGET:
            seed = hash((sampling_params["sampling_seed"], turn)) % 2**31
            limit = min(3, BUDGET - sample.response_length)
            params = {**sampling_params, "max_new_tokens": limit, "sampling_seed": seed}
            answer = await self.client.generate(
                {"input_ids": sample.tokens, "sampling_params": params}, name=f"sample {sample.index}"
            )
            record_answer(sample, answer)
            reason = answer["meta_info"]["finish_reason"]["type"]
            if self.careless:
                sample.status = STATUS.COMPLETED
            elif reason == "abort":
                return sample
            if reason == "stop":
                break
            turn += 1
        sample.status = STATUS.COMPLETED
        return sample


def check_sample(sample, client, *, masked_from=None):
    """Each token in its place, once, with what the engine said of it."""
    length = sample.response_length
    expected = [token_at(sample.index, position) for position in range(length)]
    assert sample.tokens[PROMPT_LENGTH:] == expected, sample
    assert length <= min(BUDGET, client.length_of(sample.index))
    if length:
        assert sample.rollout_log_probs == [log_prob_of(token) for token in expected]
        assert len(sample.loss_mask) == len(sample.weight_versions) == length
        for position, version in enumerate(sample.weight_versions):
            assert version in client.generated[sample.index, position]
        assert sample.weight_versions == sorted(sample.weight_versions)
    if sample.status in (STATUS.COMPLETED, STATUS.TRUNCATED):
        assert length == min(BUDGET, client.length_of(sample.index))


class Schedule:
    """A run of a few rollouts with everything random; a crash goes back to the last checkpoint."""

    def __init__(self, loop, seed, **fixed):
        self.loop, self.seed = loop, seed
        chance = self.chance = random.Random(seed)
        self.batch = chance.choice((1, 1, 2))
        self.over = chance.choice((None, self.batch + 1, self.batch + 1, self.batch + 2))
        self.partial = PartialOptions(chance.random() < 0.75, chance.random() < 0.3)
        if not self.partial.enabled:
            self.partial = PartialOptions()
        self.deterministic = chance.random() < 0.15
        self.filter = keep_mixed if chance.random() < 0.25 else None
        self.generate = chance.choice((None, None, None, None, "turns", "careless"))
        self.newest_first = chance.random() < 0.2
        self.failing = chance.random() < 0.3
        for name, value in fixed.items():
            setattr(self, name, value)
        fates = {"fail": 0.02, "refuse": 0.05, "stick": 0.02} if self.failing else {}
        self.client = FakeClient(seed, **fates)
        self.grader = FakeGrader(seed, fail=0.1 if self.failing else 0.0)
        self.source = self.new_source()
        self.trained: list[int] = []
        self.filtered: list[int] = []
        self.delivered: list = []
        self.checkpoint = self.save()

    def new_source(self):
        source = make_source(self.partial.enabled)
        if self.newest_first:
            source._buffer_filter_hook = lambda rollout_id, buffer, number: buffer[-number:]
        return source

    def save(self):
        state = json.dumps(self.source.state_dict())
        return state, list(self.trained), list(self.filtered)

    def restore(self):
        state, trained, filtered = self.checkpoint
        self.trained, self.filtered, self.delivered = list(trained), list(filtered), []
        self.source = self.new_source()
        self.source.load_state_dict(json.loads(state))
        waiting = [*json.loads(state)["in_flight"], *json.loads(state)["returned"]]
        assert json.loads(json.dumps(self.source.state_dict()))["returned"] == waiting

    def rollout(self, rollout_id):
        client = self.client
        load = None
        if self.generate:
            turns = Turns(client, self.generate == "careless")
            load = lambda path: turns  # noqa: E731
        sampling = SamplingOptions({}, BUDGET, None, False, self.seed)
        options = RolloutOptions(self.batch, self.over, self.deterministic, max_draws=8)
        with client.scope() as scope:
            client.begin(scope)
            runner = GroupRunner(
                *(client, Tokenizer(), self.grader, sampling, scope),
                rollout_id=rollout_id,
                custom_generate=self.generate,
                load_generate=load,
                partial=self.partial,
            )
            collector = GroupCollector(self.source, runner, client, scope, options, self.filter)
            groups = self.loop.run_until_complete(collector.collect())
        self.check(groups, collector)
        return groups

    def check(self, groups, collector):
        counts = collector.counts
        assert len(groups) == self.batch and all(is_finished(group) for group in groups)
        assert [group[0].index for group in groups] == sorted(group[0].index for group in groups)
        assert counts.submitted == len(groups) - counts.filled + counts.filtered + counts.carried
        assert counts.submitted == counts.finished + counts.aborted and counts.discarded == 0
        assert sum(counts.reasons.values()) == counts.filtered
        for group in groups:
            assert len(group) == GROUP and {sample.group_index for sample in group} == {group[0].group_index}
            for sample in group:
                check_sample(sample, self.client)
        for group in self.source.buffer:
            for sample in group:
                check_sample(sample, self.client)
                assert self.partial.enabled or is_finished(group) or not sample.response_length
        kept = {id(group) for group in groups}
        self.filtered += [group[0].group_index for group in collector.decided if id(group) not in kept]
        self.partials = counts.partial_samples

    def run(self):
        statistics = Counter()
        for rollout_id in range(self.chance.choice((2, 2, 3))):
            self.client.weight_version = rollout_id
            try:
                self.delivered.append(self.rollout(rollout_id))
            except (EngineError, HookError):  # Too few are left by filter and aborts.
                statistics["crashes"] += 1
                self.client.fail = 0.0
                self.restore()
                continue
            statistics["partial"] += self.partials
            # As in asynchronous training, a rollout may be ahead of what is trained.
            for groups in self.delivered[: len(self.delivered) - (self.chance.random() < 0.3)]:
                self.trained += [group[0].group_index for group in groups]
                mark_consumed(self.source, groups)
                self.delivered.remove(groups)
            if self.chance.random() < 0.5:
                self.checkpoint = self.save()
                if self.chance.random() < 0.5:
                    self.restore()
                    statistics["resumes"] += 1
        source = self.source
        in_flight = [group[0].group_index for group, _ in source._in_flight.values()]
        waiting = [group[0].group_index for group in [*source.buffer, *source._returned]] + in_flight
        assert sorted(self.trained + self.filtered + waiting) == list(range(source.group_index))
        assert all(start + limit <= BUDGET for start, limit in self.client.budgets)
        return statistics


@pytest.fixture
def loop():
    loop = VirtualTimeLoop()
    yield loop
    loop.close()


@pytest.mark.timeout(300)
def test_each_prompt_is_trained_filtered_or_waiting_once_in_ten_thousand_schedules(loop, caplog):
    caplog.set_level(logging.ERROR)
    logging.disable(logging.WARNING)
    statistics = Counter()
    try:
        for seed in range(SCHEDULES):
            try:
                statistics += Schedule(loop, seed).run()
            except BaseException as error:
                raise AssertionError(f"schedule {seed}: {error!r}") from error
    finally:
        logging.disable(logging.NOTSET)
    print(statistics)
    assert statistics["partial"] > 1000 and statistics["crashes"] > 100 and statistics["resumes"] > 1000


def run_rollouts(loop, schedule, count):
    """So many rollouts, each trained at once; their samples as plain data."""
    found = []
    for _ in range(count):
        schedule.client.weight_version = rollout_id = getattr(schedule, "next_id", 0)
        schedule.next_id = rollout_id + 1
        groups = schedule.rollout(rollout_id)
        mark_consumed(schedule.source, groups)
        found.append([sample.to_dict() for group in groups for sample in group])
    return found


ONGOING = {"partial": PartialOptions(True), "filter": None, "generate": None, "deterministic": False, "failing": False}


def ongoing(loop, seed, **changes):
    return Schedule(loop, seed, **{**ONGOING, "batch": 2, "over": 6, "newest_first": False, **changes})


def test_a_resume_with_partial_samples_in_the_buffer_is_the_straight_run_bit_by_bit(loop):
    partial = 0
    for seed in range(40):
        straight = ongoing(loop, seed)
        expected = run_rollouts(loop, straight, 5)
        first = ongoing(loop, seed)
        found = run_rollouts(loop, first, 2)
        partial += first.partials
        second = ongoing(loop, seed)
        second.next_id, second.client.generated = 2, first.client.generated
        second.source.load_state_dict(json.loads(json.dumps(first.source.state_dict())))
        assert found + run_rollouts(loop, second, 3) == expected
        assert second.source.state_dict() == straight.source.state_dict()
    assert partial > 10


def test_a_continued_sample_has_tokens_of_several_versions_and_repeats_none(loop):
    mixed = 0
    for seed in range(40):
        schedule = ongoing(loop, seed)
        samples = [sample for rollout in run_rollouts(loop, schedule, 4) for sample in rollout]
        mixed += sum(len(set(sample["weight_versions"])) > 1 for sample in samples)
        assert all(len(versions) == 1 for versions in schedule.client.generated.values()), "generated once"
        assert all(sample["loss_mask"] == [1] * sample["response_length"] for sample in samples)
    assert mixed > 10


def test_with_the_mask_only_what_is_new_of_a_continued_group_is_trained(loop):
    masked = 0
    for seed in range(40):
        schedule = ongoing(loop, seed, partial=PartialOptions(True, mask_earlier=True))
        for rollout_id, samples in enumerate(run_rollouts(loop, schedule, 4)):
            for group in zip(samples[::GROUP], samples[1::GROUP], strict=True):
                earlier = [version < rollout_id for sample in group for version in sample["weight_versions"]]
                mask = [value for sample in group for value in sample["loss_mask"]]
                # A group that came finished, as surplus, is trained as it was recorded.
                assert mask == [int(not old) for old in earlier] or all(earlier)
                masked += 0 in mask
    assert masked > 10


def test_finished_members_of_a_partial_group_are_neither_generated_nor_judged_again(loop):
    schedule = ongoing(loop, 0)
    schedule.client.length_of = lambda sample: 1 if sample % GROUP else BUDGET
    judged = Counter()

    class AtOnce(FakeGrader):
        async def grade(self, sample, reward_key=None):
            judged[sample.index] += 1
            sample.reward = 1.0

    schedule.grader = AtOnce(0)
    run_rollouts(loop, schedule, 6)
    assert any(is_finished([group[1]]) and not is_finished([group[0]]) for group in schedule.source.buffer)
    assert set(judged.values()) == {1}
    assert all(len(versions) == 1 for versions in schedule.client.generated.values())


def test_a_function_that_takes_a_cut_answer_for_a_whole_one_starts_again_from_what_it_was_given(loop, caplog):
    restarted = 0
    for seed in range(30):
        schedule = ongoing(loop, seed, generate="careless")
        run_rollouts(loop, schedule, 3)
        for group in schedule.source.buffer:
            restarted += sum(sample.status is STATUS.ABORTED and not sample.response_length for sample in group)
    assert restarted > 10 and "went on after an answer that an abort had cut short" in caplog.text


def test_deterministic_nothing_is_aborted_and_surplus_is_kept_finished(loop):
    for seed in range(20):
        schedule = ongoing(loop, seed, deterministic=True)
        for _ in range(3):
            run_rollouts(loop, schedule, 1)
            assert schedule.partials == 0 and schedule.source.buffer
            assert all(is_finished(group) for group in schedule.source.buffer)


def test_without_the_option_a_checkpoints_partial_samples_start_anew(loop):
    schedule = ongoing(loop, 1)
    run_rollouts(loop, schedule, 2)
    assert schedule.partials
    source = make_source(partial=False)
    source.load_state_dict(json.loads(json.dumps(schedule.source.state_dict())))
    assert source.buffer and all(is_finished(g) or not any(s.response_length for s in g) for g in source.buffer)
