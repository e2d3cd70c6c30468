"""k rollouts + resume + (n - k) rollouts = n rollouts, bit by bit."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.running import metrics_of, run_training, start_training, tiny_arguments, write_sums

pytestmark = pytest.mark.timeout(900)
MARKER = "checkpoints/latest_checkpointed_iteration.txt"


def _arguments(model: Path, data: Path, num_rollout: int) -> list[object]:
    """Two steps a rollout; 6 prompts, so that rollout 1 crosses an epoch's end; a filter fills the buffer."""
    return [
        *tiny_arguments(model, data),
        *("--num-rollout", num_rollout, "--num-steps-per-rollout", 2, "--deterministic", "--rollout-shuffle"),
        *("--over-sampling-batch-size", 6, "--save-interval", 1, "--use-kl-loss", "--kl-loss-coef", 0.01),
        *("--dynamic-sampling-filter-path", "colloid.rollout.filters.check_reward_nonzero_std"),
    ]


def _weights(run_dir: Path, iteration: int) -> dict[str, bytes]:
    trainer = run_dir / f"checkpoints/iter_{iteration:07d}/trainer"
    return {str(path.relative_to(trainer)): path.read_bytes() for path in trainer.rglob("*.distcp")}


def _data_source(run_dir: Path, iteration: int) -> str:
    rollout = run_dir / f"checkpoints/iter_{iteration:07d}/rollout"
    return next(rollout.glob("*data_source*.json")).read_text()


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny_model_dir):
    """Four rollouts in one go."""
    directory = tmp_path_factory.mktemp("straight")
    data = write_sums(directory / "data.jsonl", 6)
    ended = run_training(directory, *_arguments(tiny_model_dir("qwen3"), data, 4), "--run-name", "run")
    assert ended.code == 0, ended.output
    return directory / "outputs/run"


def _same_run(first: Path, second: Path) -> None:
    assert metrics_of(first) == metrics_of(second)
    assert _weights(first, 3) == _weights(second, 3)
    assert _data_source(first, 3) == _data_source(second, 3)


def test_the_straight_run_has_what_the_test_is_about(straight):
    assert '"buffer":[[' in _data_source(straight, 1).replace(" ", ""), "groups wait in the buffer at the resume"
    assert '"epoch":0' not in _data_source(straight, 1).replace(" ", ""), "the first epoch's end was crossed"
    assert metrics_of(straight)[0]["train/step_0/ppo_kl"] < 1e-6
    assert metrics_of(straight)[0]["train/step_1/ppo_kl"] != 0


def test_two_and_two_rollouts_are_four(straight, tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 6)
    model = tiny_model_dir("qwen3")
    first = run_training(tmp_path, *_arguments(model, data, 2), "--run-name", "run")
    assert first.code == 0, first.output
    checkpoints = tmp_path / "outputs/run/checkpoints"
    second = run_training(tmp_path, *_arguments(model, data, 4), "--load", checkpoints)
    assert second.code == 0, second.output
    _same_run(straight, tmp_path / "outputs/run")


def test_a_run_killed_during_a_save_goes_on_from_the_last_good_checkpoint(straight, tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 6)
    model = tiny_model_dir("qwen3")
    run_dir = tmp_path / "outputs/run"
    process = start_training(tmp_path, *_arguments(model, data, 4), "--run-name", "run")
    deadline = time.monotonic() + 400
    while not list(run_dir.glob("checkpoints/.writing_iter_0000002")):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    assert (run_dir / MARKER).read_text() == "1"
    again = run_training(tmp_path, *_arguments(model, data, 4), "--load", run_dir / "checkpoints")
    assert again.code == 0, again.output
    _same_run(straight, run_dir)


def test_a_finished_run_says_so(straight, tmp_path, tiny_model_dir):
    data = straight.parents[1] / "data.jsonl"
    arguments = _arguments(tiny_model_dir("qwen3"), data, 4)
    ended = run_training(straight.parents[1], *arguments, "--load", straight / "checkpoints", timeout=400)
    assert ended.code == 2
    assert "--num-rollout" in ended.output
