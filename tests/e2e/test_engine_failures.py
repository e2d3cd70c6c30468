"""A run whose engines fail, with `--use-fault-tolerance` and without it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from colloid.engines.control import EngineControl
from colloid.errors import EngineError
from tests.e2e.running import metrics_of, run_training, start_training, tiny_arguments, write_sums

KEY = "the key of the run"
DEADLINE = 400.0
OF_POOL = ("engine/", "router/")

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def options(directory: Path, model: Path, *more: object) -> list[object]:
    data = write_sums(directory / "data.jsonl", 40)
    plain = [64 if value == 8 else value for value in tiny_arguments(model, data)]  # responses that take a while
    return [*plain, "--rollout-num-gpus", 2, "--num-rollout", 4, "--deterministic", *more]


def kill_busy_engine(process, directory: Path, run_name: str, number: int) -> str:
    """Once a rollout is trained, and requests run at the first engine. Returns its address."""
    run_dir = directory / "outputs" / run_name
    deadline = time.monotonic() + DEADLINE
    while True:
        assert time.monotonic() < deadline and process.poll() is None, (directory / "output.txt").read_text()[-3000:]
        time.sleep(0.02)
        if not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
            continue
        serves = json.loads((run_dir / "engines/engine_0.ready.json").read_text())
        try:
            state = EngineControl(serves["url"], KEY, 5.0).get("/server_info")["internal_states"][0]
        except EngineError:
            continue
        if state["num_running_reqs"]:
            os.kill(serves["pid"], number)
            return serves["url"]


def ended(process, directory: Path) -> tuple[int, str]:
    try:
        code = process.wait(DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    return code, (directory / "output.txt").read_text()


def test_a_run_whose_engine_is_killed_in_a_rollout_is_the_undisturbed_run(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("COLLOID_API_KEY", KEY)
    tolerant = ("--use-fault-tolerance", "--rollout-health-check-interval", 1, "--check-weight-update-equal")
    arguments = options(tmp_path, tiny_model_dir(), *tolerant)
    straight = run_training(tmp_path, *arguments, "--run-name", "straight", timeout=DEADLINE)
    assert straight.code == 0, straight.output[-5000:]

    # It goes on until the replacement has joined, whatever the machine has to do beside.
    process = start_training(tmp_path, *arguments, "--run-name", "killed")
    url = kill_busy_engine(process, tmp_path, "killed", signal.SIGKILL)
    code, output = ended(process, tmp_path)
    assert code == 0, output[-5000:]
    assert f"engine {url} (engine_0, pid" in output and "is taken out: it ended with -9" in output

    lines, undisturbed = metrics_of(tmp_path / "outputs/killed"), metrics_of(tmp_path / "outputs/straight")
    assert [without(line, OF_POOL) for line in lines] == [without(line, OF_POOL) for line in undisturbed]
    assert [line["engine/failed_requests"] for line in undisturbed] == [0.0] * 4
    assert lines[-1]["engine/failed_requests"] > 0


def test_the_only_engine_is_replaced_and_given_the_weights_of_the_rollout(tmp_path, tiny_model_dir, monkeypatch):
    """Nothing but that lets the rollout end, so the replacement is always seen."""
    monkeypatch.setenv("COLLOID_API_KEY", KEY)
    arguments = options(tmp_path, tiny_model_dir(), "--use-fault-tolerance", "--check-weight-update-equal")
    arguments[arguments.index("--rollout-num-gpus") + 1] = 1
    process = start_training(tmp_path, *arguments, "--run-name", "run")
    kill_busy_engine(process, tmp_path, "run", signal.SIGKILL)
    code, output = ended(process, tmp_path)
    assert code == 0, output[-5000:]
    lines = metrics_of(tmp_path / "outputs/run")
    assert len(lines) == 4 and lines[-1]["engine/replaced"] == 1 and lines[-1]["engine/alive"] == 1
    assert [line["weight_version"] for line in lines] == [2, 3, 4, 5]
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-4 for line in lines)


def test_without_the_option_a_killed_engine_ends_the_run_and_is_named(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("COLLOID_API_KEY", KEY)
    process = start_training(tmp_path, *options(tmp_path, tiny_model_dir()), "--run-name", "run")
    url = kill_busy_engine(process, tmp_path, "run", signal.SIGKILL)
    code, output = ended(process, tmp_path)
    assert code == 1 and f"engine {url} (engine_0, pid" in output and "ended with -9" in output


def without(line: dict, prefixes: tuple[str, ...]) -> dict:
    return {name: value for name, value in line.items() if not name.startswith(prefixes)}
