"""Processes of a run are killed at every moment: it goes on as if nothing had been, or ends and says who it was.

A part runs always. The whole matrix takes half an hour: `python -m pytest tests/e2e/test_kill_matrix.py -m slow`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from colloid.observe.metrics import read_metrics
from tests.e2e.running import write_sums
from tests.faults.runs import FaultyRun, check_same_run, fault_arguments, kill, restarts_of

pytestmark = pytest.mark.timeout(900)
NUM_ROLLOUT = 4
MOMENTS = {
    "rollout": "rollout 1",
    "training": "trainer ranks on rollout 1",
    "save": "the checkpoint of rollout 1",
    "sync": "the weight update to version 3",
}
"""Where the run is held, and what it waits for there."""
ENDS_WITHIN = 90.0
"""Seconds from a death until the run has ended, on a busy machine too."""
NAMES = {"trainer": r"trainer rank \d", "manager": "the rollout actor"}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, tiny_model_dir):
    """Of a run, with its weights on disk or in shared memory."""
    data = write_sums(tmp_path_factory.mktemp("data") / "data.jsonl", 16)
    return lambda disk=True: fault_arguments(tiny_model_dir("qwen3"), data, NUM_ROLLOUT, disk=disk)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, arguments):
    """The run directory of a run that nothing happened to."""
    run = FaultyRun(tmp_path_factory.mktemp("undisturbed"), arguments())
    assert run.end() == 0, run.output
    return run.run_dir


@pytest.fixture
def started(tmp_path, arguments):
    """Starts runs; all of their processes end with the test."""
    runs = []

    def start(*more: object, disk: bool = True, **options) -> FaultyRun:
        runs.append(FaultyRun(tmp_path, [*arguments(disk), *more], **options))
        return runs[-1]

    yield start
    for run in runs:
        run.kill_all()


def ended(who: str, pid: int, what: str) -> re.Pattern:
    """The error of a process that was killed while something was waited for."""
    return re.compile(rf"{NAMES[who]} \(pid {pid} on \S+\) ended while the run waited for {what}\b")


def test_a_run_whose_processes_are_killed_one_after_another_is_the_undisturbed_run(started, undisturbed):
    """A grader and the rollout actor; that of engine, router and trainer rank is shown by examples/fault_tolerance."""
    run = started("--max-restarts", 1)
    with run.held("grading", 0) as grader:
        assert grader in run.pids("grader")
        kill([grader])
    with run.held("sync", 3):  # after the last checkpoint: nothing is left to train, but that rollout is not logged yet
        (manager,) = run.pids("manager")
        kill([manager])
    assert run.end() == 0, run.output
    (restart,) = restarts_of(run.run_dir)
    assert ended("manager", manager, "the weight update to version 5").match(restart["reason"]), restart
    assert Path(restart["from"]).name == "iter_0000003"
    check_same_run(run.run_dir, undisturbed)
    run.check_nothing_left()


def test_a_trainer_rank_that_dies_while_a_rollout_is_waited_for_ends_the_run_by_name(started):
    """It is idle then: nothing that it was asked for fails."""
    run = started("--actor-num-gpus-per-node", 2, disk=False)
    with run.held("rollout", 1):
        assert any("colloid-weights" in path for path in run.shared_memory)
        victim = run.pids("trainer")[1]
        kill([victim])
        killed = time.monotonic()
        assert run.end(ENDS_WITHIN) == 1, "it ends although the rollout does not"
    print(f"ended {time.monotonic() - killed:.1f} s after the death")
    assert ended("trainer", victim, "rollout 1").search(run.output), run.output[-3000:]
    assert ended("trainer", victim, "rollout 1").search((run.run_dir / "log.txt").read_text().splitlines()[-1])
    run.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("who", NAMES)
def test_with_max_restarts_the_run_is_the_undisturbed_one(started, undisturbed, who, when):
    run = started("--max-restarts", 1)
    with run.held(when, 1):
        (pid,) = run.pids(who)
        kill([pid])
    assert run.end() == 0, run.output
    (restart,) = restarts_of(run.run_dir)
    assert re.match(rf"{NAMES[who]} \(pid {pid} on \S+\) ended while the run waited for ", restart["reason"]), restart
    check_same_run(run.run_dir, undisturbed)
    run.check_nothing_left()


@pytest.mark.slow
def test_a_run_whose_node_is_gone_is_the_undisturbed_one_too(started, undisturbed):
    """Ray's own process on the host is killed, and everything that it had started with it."""
    run = started("--max-restarts", 1)
    with run.held("training", 1):
        kill(run.pids("node"))
    assert run.end() == 0, run.output
    assert len(restarts_of(run.run_dir)) == 1
    check_same_run(run.run_dir, undisturbed)
    run.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("who", NAMES)
def test_without_it_the_run_ends_within_its_deadline_and_says_who_it_was(started, who, when):
    run = started("--actor-num-gpus-per-node", 2, disk=when == "sync")
    with run.held(when, 1):
        pid = run.pids(who)[-1]
        kill([pid])
    assert run.end(ENDS_WITHIN) == 1, run.output
    assert re.search(rf"error: {NAMES[who]} \(pid {pid} on \S+\) ended while ", run.output), run.output[-3000:]
    assert (run.run_dir / "checkpoints/latest_checkpointed_iteration.txt").read_text() in ("0", "1")
    run.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("when", "rollout_id"), [*((when, 1) for when in MOMENTS), ("sync", NUM_ROLLOUT - 1)])
def test_a_killed_drivers_run_is_gone_on_with_by_hand(started, undisturbed, when, rollout_id):
    """Also at its last sync: then it has not finished."""
    run = started()
    with run.held(when, rollout_id):
        kill(run.pids("driver"))
        assert run.end() == -signal.SIGKILL
        run.wait_until_gone()
    again = started("--load", run.run_dir / "checkpoints")
    assert again.end() == 0, again.output
    check_same_run(again.run_dir, undisturbed)
    again.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["grading", "training", "save", "sync"])
def test_graders_are_replaced(started, undisturbed, when):
    run = started()
    with run.held(when, 1):
        kill(run.pids("grader"))
    assert run.end() == 0, run.output
    check_same_run(run.run_dir, undisturbed)
    run.check_nothing_left()


REPLACED = (
    "--use-fault-tolerance",
    "--check-weight-update-equal",
    "--rollout-health-check-interval",
    1,
    "--rollout-health-check-timeout",
    20,
)


@pytest.mark.slow
@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("who", ["engine", "router"])
def test_engines_and_the_router_are_replaced(started, undisturbed, who, when):
    run = started(*REPLACED)
    with run.held(when, 1):
        kill(run.pids(who))
    assert run.end() == 0, run.output
    last = read_metrics(run.run_dir)[-1]
    assert last["engine/replaced" if who == "engine" else "router/restarted"] == 1
    check_same_run(run.run_dir, undisturbed)
    run.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["rollout", "training"])
def test_an_engine_that_hangs_is_replaced(started, undisturbed, when):
    run = started(*REPLACED)
    with run.held(when, 1):
        (engine,) = run.pids("engine")
        os.kill(engine, signal.SIGSTOP)
    assert run.end() == 0, run.output
    assert read_metrics(run.run_dir)[-1]["engine/replaced"] == 1
    check_same_run(run.run_dir, undisturbed)
    run.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("who", ["engine", "router"])
def test_else_their_end_is_that_of_the_run(started, who, when):
    run = started()
    with run.held(when, 1):
        (pid,) = run.pids(who)
        kill([pid])
    assert run.end(ENDS_WITHIN) == 1, run.output
    assert re.search(rf"\berror: .*{who} http\S+ .*(pid {pid}|ended with -9)", run.output), run.output[-3000:]
    run.check_nothing_left()


@pytest.mark.slow
def test_an_asynchronous_run_goes_on_too(started, tmp_path_factory, arguments):
    entry, ahead = "train_async.py", ("--async-buffer-size", 1)
    undisturbed = FaultyRun(tmp_path_factory.mktemp("asynchronous"), [*arguments(), *ahead], entry)
    assert undisturbed.end() == 0, undisturbed.output
    run = started(*ahead, "--max-restarts", 2, entry=entry)
    for moment, rollout, who in (("training", 2, "trainer"), ("rollout", 3, "manager")):
        with run.held(moment, rollout):
            kill(run.pids(who))
    assert run.end() == 0, run.output
    assert len(restarts_of(run.run_dir)) == 2
    check_same_run(run.run_dir, undisturbed.run_dir)
    run.check_nothing_left()


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_collective_ends_the_run_by_name(started):
    run = started("--actor-num-gpus-per-node", 2, "--distributed-timeout-minutes", 1)
    with run.held("training", 1) as reached:
        (other,) = set(run.pids("trainer")) - {reached}
        os.kill(other, signal.SIGSTOP)
    stopped = time.monotonic()
    assert run.end(60 + ENDS_WITHIN) == 1
    print(f"ended {time.monotonic() - stopped:.1f} s after the rank stopped")
    assert re.search(rf"without an answer: trainer rank \d \(pid {other} on ", run.output), run.output[-3000:]
    run.check_nothing_left()


@pytest.mark.slow
def test_a_run_that_fails_at_the_same_place_again_and_again_ends(started):
    run = started("--max-restarts", 1)
    for _ in range(2):
        with run.held("training", 1) as trainer:
            kill([trainer])
    assert run.end() == 1
    assert len(restarts_of(run.run_dir)) == 1
    run.check_nothing_left()
