"""Asynchronous training in simulated time: never too far ahead, never too stale, and as fast as the slower half."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from colloid.config.asynchrony import least_staleness
from colloid.loop import RolloutsAhead, overlap_metrics

SCHEDULES = 10_000


class SimulatedRun:
    """Rollouts are made one after another, beside the trainer; `now` is the trainer's time."""

    def __init__(self, generate_seconds, version=1):
        self.generate_seconds = generate_seconds
        self.now = 0.0
        self.weight_version = version
        self.updates = [(0.0, version)]
        self.engine_free = 0.0
        self.made = {}

    def start_rollout(self, rollout_id, weight_version, trained):
        begin = max(self.now, self.engine_free)
        self.engine_free = begin + self.generate_seconds(rollout_id)
        self.made[rollout_id] = SimpleNamespace(
            trained_version=weight_version, begin=begin, end=self.engine_free, behind=trained + 1
        )
        return rollout_id

    def wait_for_rollout(self, rollout_id, reference):
        assert reference == rollout_id
        self.now = max(self.now, self.made[rollout_id].end)
        return self.made[rollout_id]

    def sync(self, seconds=0.0):
        self.now += seconds
        self.weight_version += 1
        self.updates.append((self.now, self.weight_version))

    def version_at(self, time):
        return max(version for when, version in self.updates if when <= time)


def simulate(run, args, train_seconds, sync_seconds=0.0):
    """The loop's order of things; yields (rollout id, rollout, seconds of the step) as each is trained."""
    ahead = RolloutsAhead(run, args)
    for rollout_id in range(args.num_rollout):
        ahead.start(rollout_id)
        begin = run.now
        rollout = ahead.take(rollout_id)
        assert rollout.trained_version == run.weight_version
        assert sum(made > rollout_id for made in run.made) <= args.async_buffer_size
        run.now += train_seconds(rollout_id)
        yielded = rollout_id, rollout, run.weight_version
        if (rollout_id + 1) % args.update_weights_interval == 0:
            ahead.settle()
            run.sync(sync_seconds)
        yield *yielded, run.now - begin


def options(size, interval, staleness, num_rollout=12, deterministic=False):
    return SimpleNamespace(
        async_buffer_size=size,
        update_weights_interval=interval,
        max_staleness=staleness,
        num_rollout=num_rollout,
        deterministic=deterministic,
    )


def test_no_token_is_older_than_the_bound_on_any_schedule():
    chance = random.Random(0)
    reached = 0
    for _ in range(SCHEDULES):
        size, interval = chance.randint(1, 5), chance.randint(1, 4)
        staleness = least_staleness(size, interval) + chance.choice((0, 0, 1, 3))
        args = options(size, interval, staleness, deterministic=chance.random() < 0.3)
        run = SimulatedRun(lambda _: chance.expovariate(1.0))
        for rollout_id, rollout, version, _ in simulate(run, args, lambda _: chance.expovariate(1.0)):
            age = version - run.version_at(rollout.begin)
            assert 0 <= age <= staleness
            reached = max(reached, age)
            if args.deterministic:
                started = 1 + max(0, rollout_id - size) // interval
                assert run.version_at(rollout.begin) == run.version_at(rollout.end - 1e-12) == started
        assert sorted(run.made) == list(range(args.num_rollout))
    assert reached >= 3, "the bound was never near"


def test_a_bound_below_what_the_buffer_makes_of_it_holds_rollouts_back():
    args = options(4, 1, 2)
    run = SimulatedRun(lambda _: 0.1)
    ages = [version - run.version_at(rollout.begin) for _, rollout, version, _ in simulate(run, args, lambda _: 1.0)]
    assert max(ages) == 2 and len(run.made) == 12


@pytest.mark.parametrize(("generate", "train"), [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_takes_as_long_as_the_longer_half(generate, train, deterministic):
    args = options(1, 1, 1, num_rollout=40, deterministic=deterministic)
    run = SimulatedRun(lambda _: generate)
    steps = [seconds for *_, seconds in simulate(run, args, lambda _: train, sync_seconds=0.01)]
    efficiency = max(generate, train) * len(steps[1:]) / sum(steps[1:])
    assert efficiency >= 0.95
    metrics = overlap_metrics(
        {
            "perf/step_time": steps[5],
            "perf/rollout_time": generate,
            "perf/train_time": train,
            "perf/rollout_wait_time": max(0.0, generate - train),
        }
    )
    assert metrics["perf/overlap_efficiency"] >= 0.95
    assert metrics["perf/trainer_idle_ratio"] == pytest.approx(max(0.0, generate - train) / steps[5])
