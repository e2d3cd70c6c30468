"""Runs in which trainer and engines have the memory in turns are the runs without, bit by bit.

pytest tests/e2e/test_colocation.py -m slow
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.running import metrics_of, run_training, tiny_arguments, write_sums

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITHOUT = ("--no-offload-train", "--no-offload-rollout")
TWO_RANKS = ("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1)
RUNS: dict[str, tuple] = {
    "tensor": ("--check-weight-update-equal", "--keep-old-actor", "--use-kl-loss", "--kl-loss-coef", 0.1),
    "disk": ("--update-weight-transport", "disk", "--check-weight-update-equal"),
    "gloo": ("--update-weight-transport", "gloo", "--check-weight-update-equal"),
    "delta": ("--update-weight-mode", "delta", "--check-weight-update-equal"),
    "interval": ("--update-weights-interval", 2),
    "critic": ("--num-steps-per-rollout", 2, "--value-clip", 0.1),
    "two ranks": (*TWO_RANKS, "--use-distributed-optimizer", "--bf16", "--sglang-dtype", "float32"),
}


def train(directory: Path, model: Path, name: str, *options: object, estimator: str = "grpo") -> Path:
    data = write_sums(directory / "train.jsonl", 24)
    ended = run_training(
        directory,
        *tiny_arguments(model, data, estimator=estimator),
        *("--colocate", "--num-rollout", 3, "--deterministic", "--run-name", name, *options),
    )
    assert ended.code == 0, ended.output[-5000:]
    return directory / "outputs" / name


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_memory_in_turns_is_the_run_without(name, tmp_path, tiny_model_dir):
    model, estimator = tiny_model_dir("qwen3"), "ppo" if name == "critic" else "grpo"
    turns = train(tmp_path, model, "turns", *RUNS[name], estimator=estimator)
    without = train(tmp_path, model, "without", *RUNS[name], *WITHOUT, estimator=estimator)
    assert metrics_of(turns) == metrics_of(without) and len(metrics_of(turns)) == 3


def test_a_run_that_is_resumed_goes_on_as_the_straight_one_with_evaluation_and_exports(tmp_path, tiny_model_dir):
    model, data = tiny_model_dir("qwen3"), write_sums(tmp_path / "eval.jsonl", 6)
    evaluation = ("--eval-interval", 1, "--eval-prompt-data", "sums", data, "--eval-max-response-len", 6)
    saves = ("--save-interval", 1, "--save-hf", tmp_path / "hf_{rollout_id}", *evaluation)
    straight = train(tmp_path, model, "straight", *saves, *WITHOUT)
    turns = train(tmp_path, model, "turns", *saves)
    assert metrics_of(turns) == metrics_of(straight)
    checkpoint = turns / "checkpoints" / "iter_0000001"
    resumed = train(tmp_path, model, "resumed", "--load", checkpoint, *saves, "--async-save")
    assert metrics_of(resumed)[-2:] == metrics_of(straight)[-2:]
    ended = run_training(
        tmp_path,
        *("--colocate", "--num-rollout", 0, "--hf-checkpoint", model, "--load", checkpoint),
        *("--finetune", *evaluation, "--run-name", "evaluated", "--prompt-data", data, "--rm-type", "math"),
    )
    assert ended.code == 0, ended.output[-5000:]
    assert metrics_of(tmp_path / "outputs/evaluated")


def test_fine_tuning_with_evaluation_leaves_the_memory_to_the_trainer_between_updates(tmp_path, tiny_model_dir):
    model, data = tiny_model_dir("qwen3"), write_sums(tmp_path / "eval.jsonl", 6)
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(24)
    ]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for name, options in (("turns", ()), ("without", WITHOUT)):
        ended = run_training(
            tmp_path,
            *("--colocate", "--hf-checkpoint", model, "--loss-type", "sft_loss", "--num-rollout", 4),
            *("--prompt-data", tmp_path / "sft.jsonl", "--input-key", "messages", "--rollout-batch-size", 4),
            *("--eval-interval", 2, "--eval-prompt-data", "sums", data, "--eval-input-key", "prompt"),
            *("--rm-type", "math", "--lr", 1e-3, "--rollout-max-response-len", 16),
            *("--eval-max-response-len", 6, "--deterministic", "--run-name", name, *options),
        )
        assert ended.code == 0, ended.output[-5000:]
        found.append(metrics_of(tmp_path / "outputs" / name))
    assert found[0] == found[1]
    lines = [json.loads(line) for line in (tmp_path / "outputs/turns/metrics.jsonl").read_text().splitlines()]
    moved = [line.get("perf/memory/update/engine_rss_gib") is not None for line in lines if "train/loss" in line]
    assert moved == [False, True, False, True]
