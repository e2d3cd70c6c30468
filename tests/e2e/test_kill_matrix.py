"""Processes of a run are killed at every moment: it goes on as if nothing had been, or ends and says who it was.

What takes longer is asked for: `python -m pytest tests/e2e/test_kill_matrix.py -m slow`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.running import write_sums
from tests.faults.runs import FaultyRun, check_same_run, fault_arguments, kill, restarts_of

pytestmark = pytest.mark.timeout(900)
NUM_ROLLOUT = 4


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, tiny_model_dir):
    data = write_sums(tmp_path_factory.mktemp("data") / "data.jsonl", 16)
    return fault_arguments(tiny_model_dir("qwen3"), data, NUM_ROLLOUT)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, arguments):
    """The run directory of a run that nothing happened to."""
    run = FaultyRun(tmp_path_factory.mktemp("undisturbed"), arguments)
    assert run.end() == 0, run.output
    return run.run_dir


@pytest.fixture
def started(tmp_path, arguments):
    """Starts runs; all of their processes end with the test."""
    runs = []

    def start(*more: object, **options) -> FaultyRun:
        runs.append(FaultyRun(tmp_path, [*arguments, *more], **options))
        return runs[-1]

    yield start
    for run in runs:
        run.kill_all()


def names(who: str, pid: int, what: str) -> re.Pattern:
    """The error of a process that was killed while something was waited for."""
    return re.compile(rf"{who} \(pid {pid} on \S+\) ended while the run waited for {what}\b")


def test_a_run_whose_processes_are_killed_one_after_another_is_the_undisturbed_run(started, undisturbed):
    run = started("--max-restarts", 2)
    with run.held("grading", 0) as grader:
        assert grader in run.pids("grader")
        kill([grader])
    with run.held("training", 1) as trainer:
        assert [trainer] == run.pids("trainer")
        kill([trainer])
        run.hold("save", 2)
    with run.held("save", 2) as manager:
        assert [manager] == run.pids("manager")
        kill([manager])
    assert run.end() == 0, run.output
    first, second = restarts_of(run.run_dir)
    assert names("trainer rank 0", trainer, "trainer ranks on rollout 1").match(first["reason"]), first
    assert names("the rollout actor", manager, "the checkpoint of rollout 2").match(second["reason"]), second
    assert [Path(one["from"]).name for one in (first, second)] == ["iter_0000000", "iter_0000001"]
    check_same_run(run.run_dir, undisturbed)
    run.check_nothing_left()
