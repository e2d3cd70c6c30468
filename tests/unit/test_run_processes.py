"""Waits for a run's actors: what fails first ends them, and whoever died is the culprit. With a real Ray."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from colloid.errors import CheckpointError, ConfigError, DeadlineExceeded, HookError, ProcessDied, ProcessFailed


class Worker:
    """A process that does what the test says."""

    def __init__(self, fails: bool = False):
        if fails:
            raise ConfigError("5 ranks cannot be divided by 2")

    def pid(self) -> int:
        return os.getpid()

    def wait(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self, error: Exception, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        raise error


class Manager:
    def pid(self) -> int:
        return os.getpid()

    async def wait(self, seconds: float) -> float:
        import asyncio

        await asyncio.sleep(seconds)
        return seconds


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def run(ray):
    """The processes of a run, with two ranks and a manager: `processes, ranks, manager`."""
    from colloid.cluster.processes import Processes

    lines = []
    processes = Processes(lines.append)
    processes.lines = lines
    worker = ray.remote(Worker).options(num_cpus=0)
    ranks = [processes.add(f"trainer rank {rank}", worker.remote()) for rank in range(2)]
    manager = processes.add("the rollout actor", ray.remote(Manager).options(num_cpus=0).remote())
    processes.wait([rank.pid.remote() for rank in ranks], "ranks to start", 60)
    yield processes, ranks, manager
    for actor in [*ranks, manager]:
        ray.kill(actor)


def test_values_come_in_the_order_of_the_calls(run):
    processes, ranks, manager = run
    calls = [ranks[0].wait.remote(0.3), manager.wait.remote(0.1), ranks[1].wait.remote(0.0)]
    assert processes.wait(calls, "all", 60) == [0.3, 0.1, 0.0]


def test_a_process_that_dies_while_another_is_waited_for_ends_the_wait(run, ray):
    processes, ranks, manager = run
    pid = ray.get(ranks[1].pid.remote())
    call = manager.wait.remote(600)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        ProcessDied, match=rf"trainer rank 1 \(pid {pid} on \S+\) ended while the run waited for rollout 7"
    ):
        processes.wait([call], "rollout 7", 120)
    assert processes.any_died


def test_the_dead_one_is_named_rather_than_those_that_fail_because_of_it(run, ray):
    processes, ranks, _ = run
    pid = ray.get(ranks[1].pid.remote())
    calls = [ranks[0].fail.remote(CheckpointError("Connection closed by peer")), ranks[1].wait.remote(600)]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match=rf"^trainer rank 1 \(pid {pid} on "):
        processes.wait(calls, "trainer ranks on rollout 7", 120)


def test_who_gives_no_answer_is_named_beside_the_one_that_failed(run):
    processes, ranks, _ = run
    calls = [ranks[0].fail.remote(RuntimeError("Timed out waiting 60000ms")), ranks[1].wait.remote(600)]
    with pytest.raises(ProcessFailed) as raised:
        processes.wait(calls, "trainer ranks on rollout 7", 120)
    assert re.fullmatch(
        r"trainer rank 0 \(pid \d+ on \S+\) failed while the run waited for trainer ranks on rollout 7: "
        r"RuntimeError: Timed out waiting 60000ms; without an answer: trainer rank 1 \(pid \d+ on \S+\)",
        str(raised.value),
    )


def test_a_users_mistake_is_raised_as_it_is_and_at_once(run, monkeypatch):
    processes, ranks, _ = run
    monkeypatch.setattr("colloid.cluster.processes.GRACE", 150.0)
    began = time.monotonic()
    with pytest.raises(HookError, match="the reward raised"):
        processes.wait([ranks[0].fail.remote(HookError("the reward raised")), ranks[1].wait.remote(600)], "all", 120)
    assert time.monotonic() - began < 100


def test_a_mistake_that_shows_in_a_constructor_keeps_its_kind(run, ray):
    processes, _, _ = run
    broken = processes.add("trainer rank 2", ray.remote(Worker).options(num_cpus=0).remote(True))
    with pytest.raises(ConfigError, match="^5 ranks cannot be divided by 2$"):
        processes.wait([broken.pid.remote()], "ranks to start", 120)


def test_a_deadline_names_what_is_missing(run):
    processes, ranks, _ = run
    with pytest.raises(DeadlineExceeded, match=r"for ranks; missing: trainer rank 1 \(pid \d+ on \S+\)$"):
        processes.wait([ranks[0].wait.remote(0), ranks[1].wait.remote(600)], "ranks", 3)


def test_one_that_gives_no_sign_of_life_ends_the_wait_for_another_and_a_busy_rank_need_not(run, ray):
    processes, ranks, _ = run
    actor = ray.remote(Manager).options(num_cpus=0).remote()
    pid = ray.get(actor.pid.remote())
    processes.add("the one that hangs", actor, silence=4.0)
    busy = ranks[0].wait.remote(600)
    assert processes.wait([actor.wait.remote(6.0)], "it", 60) == [6.0], "it answers all the while"
    os.kill(pid, signal.SIGSTOP)
    try:
        words = (
            rf"^the one that hangs \(pid {pid} on \S+\) gave no sign of life for \d+ s while the run waited for rank 0"
        )
        with pytest.raises(DeadlineExceeded, match=words):
            processes.wait([busy], "rank 0", 120, meanwhile=lambda: None)
    finally:
        os.kill(pid, signal.SIGCONT)
        ray.kill(actor)


def test_at_the_end_those_that_do_not_answer_are_killed_and_the_others_waited_for(run, ray):
    processes, ranks, manager = run
    stuck = ray.get(ranks[1].pid.remote())
    os.kill(stuck, signal.SIGSTOP)
    assert processes.end([ranks[1].wait.remote(0), manager.wait.remote(1.0), ranks[0].wait.remote(0)], 5) == [1.0, 0]
    assert any("trainer rank 1" in line and "killed" in line for line in processes.lines)
