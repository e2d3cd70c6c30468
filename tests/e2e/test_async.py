"""Asynchronous training from the command line: reproducible, fully asynchronous with all that goes with it, and with an
engine that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.e2e.running import metrics_of, run_example, start_training, tiny_arguments, write_sums

pytestmark = pytest.mark.timeout(900)


def test_two_runs_with_other_delays_and_a_resumed_one_are_the_same_run(tmp_path):
    sizes = ["--num-rollout", 4, "--rollout-batch-size", 4, "--over-sampling-batch-size", 5]
    output = run_example("reproducibility", tmp_path / "outputs", *sizes, timeout=600)
    assert output.rstrip().endswith("no difference")
    first = tmp_path / "outputs/reproducibility-first"
    waiting = json.loads((first / "checkpoints/iter_0000001/rollout/waiting_rollouts.json").read_text())
    assert sorted(map(int, waiting)) == [2, 3], "the queue was not empty at the resume"
    lines = metrics_of(first)
    assert [line["staleness/max"] for line in lines][:2] == [0.0, 1.0]
    assert metrics_of(tmp_path / "outputs/reproducibility-again") == lines
    assert "never read" not in output


def test_continuous_rollouts_with_a_critic_a_filter_partial_samples_and_checkpoints(tmp_path):
    output = run_example(
        "fully_async",
        tmp_path / "outputs",
        *("--num-rollout", 4, "--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--save-interval", 2),
        *("--advantage-estimator", "ppo", "--megatron-config-path", "examples/ppo_critic/roles.yaml"),
        *("--partial-rollout", "--dynamic-sampling-filter-path", "colloid.rollout.filters.check_reward_nonzero_std"),
        *("--rollout-num-gpus", 2, "--rollout-max-response-len", 24, "--pause-mode", "abort"),
        timeout=600,
    )
    assert "mean age of a token" in output and "never read" not in output
    records = [json.loads(line) for line in (tmp_path / "outputs/fully-async/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for record in records:
        assert 0 <= record["staleness/mean"] <= record["staleness/max"] <= 3
        assert record["rollout/num_stale_groups"] == 0 and record["perf/generation_pause_time"] > 0
        assert record["train/value_loss"] > 0
        for name in ("overlap_efficiency", "trainer_idle_ratio"):
            assert 0 <= record[f"perf/{name}"] <= 1
    assert all(0 <= record["perf/rollout_idle_ratio"] <= 1 for record in records[1:])
    state = json.loads((tmp_path / "outputs/fully-async/checkpoints/iter_0000001/rollout/data_source.json").read_text())
    assert state["in_flight"], "groups run while a checkpoint is written"


def test_the_third_command_trains_and_says_when_its_engine_has_died(tmp_path, tiny_model_dir):
    """In small form: fewer devices, a tiny model, sizes of a rollout; the options of its own as they stand."""
    data = write_sums(tmp_path / "train.jsonl", 64)
    process = start_training(
        tmp_path,
        *tiny_arguments(tiny_model_dir("qwen3"), data),
        *("--actor-num-nodes", 1, "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--num-rollout", 500),
        *("--async-buffer-size", 4, "--update-weights-interval", 2, "--run-name", "third"),
        entry="train_async.py",
    )
    output, metrics = tmp_path / "output.txt", tmp_path / "outputs/third/metrics.jsonl"
    try:
        _until(process, output, lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 4)
        (pid,) = re.findall(r"engine http\S+ \(engine_0, pid (\d+)\) serves", output.read_text())
        os.kill(int(pid), signal.SIGKILL)
        code = process.wait(200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    lines = metrics_of(metrics.parent)
    assert [line["weight_version"] for line in lines if "weight_version" in line][:2] == [2.0, 3.0]
    assert max(line["staleness/max"] for line in lines) <= 3
    text = output.read_text()
    assert code not in (0, None)
    assert re.search(rf"pid {pid}\) ended with -9", text), text[-3000:]


def _until(process, output, condition):
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()[-5000:]
        time.sleep(0.05)
