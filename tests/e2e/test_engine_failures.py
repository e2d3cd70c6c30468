"""Runs whose engines fail where nothing but a replacement helps, over transports whose engines hold a connection."""

from __future__ import annotations

import pytest

from colloid.observe.metrics import read_metrics
from tests.e2e.running import write_sums
from tests.faults.runs import FaultyRun, fault_arguments, kill

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
TOLERANT = ("--use-fault-tolerance", "--check-weight-update-equal", "--rollout-health-check-interval", 1)


@pytest.fixture
def started(tmp_path, tiny_model_dir):
    """Starts runs; all of their processes end with the test."""
    runs = []

    def start(*more: object, **options) -> FaultyRun:
        data = write_sums(tmp_path / "data.jsonl", 16)
        arguments = fault_arguments(tiny_model_dir("qwen3"), data, 4, disk=False)
        runs.append(FaultyRun(tmp_path, [*arguments, *TOLERANT, *more], **options))
        return runs[-1]

    yield start
    for run in runs:
        run.kill_all()


def check(run: FaultyRun, engines: int) -> None:
    assert run.end() == 0, run.output[-5000:]
    lines = read_metrics(run.run_dir)
    assert len(lines) == 4 and lines[-1]["engine/replaced"] == engines and lines[-1]["engine/alive"] == engines
    assert [line["rollout/num_failed_samples"] for line in lines] == [0] * 4
    assert "tensors equal on all" in run.output
    run.check_nothing_left()


@pytest.mark.parametrize("transport", ["tensor", "gloo"])
def test_all_engines_are_replaced_while_a_rollout_waits_for_them(started, transport):
    run = started("--rollout-num-gpus", 2, "--update-weight-transport", transport)
    with run.held("rollout", 1):
        engines = run.pids("engine")
        assert len(engines) == 2
        kill(engines)
    check(run, 2)
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-4 for line in read_metrics(run.run_dir))


def test_an_asynchronous_run_gives_the_replacement_newer_weights(started):
    """The trainer is ahead of the engines by the time that it is idle."""
    run = started("--async-buffer-size", 1, entry="train_async.py")
    with run.held("training", 1):
        kill(run.pids("engine"))
    check(run, 1)
