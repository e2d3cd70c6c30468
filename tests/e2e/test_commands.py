"""The commands that users bring: with `--dry-run` as they stand, and for real with a tiny model on one rank."""

import gzip
import json
import subprocess
import sys

import pytest
import yaml

from tests.e2e.running import ROOT, run_training, tiny_arguments, write_sums

METRICS = (
    *("rollout/raw_reward", "rollout/response_length", "rollout/truncated_ratio"),
    *("train/loss", "train/pg_loss", "train/kl_loss", "train/entropy_loss", "train/ppo_kl", "train/pg_clipfrac"),
    *("train/grad_norm", "train/lr", "train/train_rollout_logprob_abs_diff"),
    *("perf/step_time", "perf/rollout_time", "perf/train_time", "perf/update_weights_time"),
    *("perf/rollout_tokens_per_sec", "perf/train_tokens_per_sec", "perf/wait_time_ratio"),
)

FIRST_RUN = """
source {root}/scripts/models/qwen3-4B.sh
{python} {root}/train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 \
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --rollout-batch-size 32 --n-samples-per-prompt 8 \
    --global-batch-size 256 --num-rollout 3000 --prompt-data data.jsonl ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}} --dry-run
"""
SECOND_RUN = """
source {root}/scripts/models/qwen3-4B.sh
{python} {root}/train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 \
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --prompt-data train.jsonl --input-key prompt \
    --label-key label --apply-chat-template --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 \
    --num-rollout 3000 --save-interval 100 --eval-interval 50 ${{MODEL_ARGS[@]}} --dry-run
"""
ASYNCHRONOUS = """
source {root}/scripts/models/qwen3-4B.sh
{python} {root}/train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 \
    --advantage-estimator grpo --async-buffer-size 4 --update-weights-interval 2 --prompt-data train.jsonl \
    ${{MODEL_ARGS[@]}} --dry-run
"""
COLOCATED = """
source {root}/scripts/models/qwen3-4B.sh
{python} {root}/train.py --colocate --actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.4 ${{MODEL_ARGS[@]}} \
    --prompt-data train.jsonl --dry-run
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (FIRST_RUN, ["4 ranks", "engines          4 ×", "32 prompts × 8 samples = 1 step × 256"]),
        (SECOND_RUN, ["8 ranks", "engines          8 ×", "checkpoints, each 100 rollouts", "--eval-interval"]),
        (ASYNCHRONOUS, ["8 ranks", "4 rollouts ahead", "each 2 rollouts, tokens at most 3 updates old"]),
        (COLOCATED, ["8 ranks", "8 device slots", "colocated", "the trainer gives its own to a file of the run"]),
    ],
    ids=["first run", "checkpoints and evaluation", "asynchronous", "colocated"],
)
def test_a_command_stands_as_it_is_with_dry_run(tmp_path, script, expected):
    for name in ("data.jsonl", "train.jsonl"):
        write_sums(tmp_path / name, 64)
    command = script.format(root=ROOT, python=sys.executable)
    ended = subprocess.run(["bash", "-ec", command], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    for text in expected:
        assert text in ended.stdout + ended.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.timeout(900)
def test_the_first_command_trains(tmp_path, tiny_model_dir):
    model, data = tiny_model_dir("qwen3"), write_sums(tmp_path / "data.jsonl", 16)
    ended = run_training(
        tmp_path,
        *tiny_arguments(model, data),
        *("--actor-num-nodes", 1, "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1),
        *("--use-kl-loss", "--kl-loss-coef", 0.001, "--global-batch-size", 16, "--num-rollout", 2),
        *("--run-name", "first", "--update-weight-buffer-size", 65536, "--check-weight-update-equal"),
        *("--use-pytorch-profiler", "--profile-step-start", 1, "--profile-step-end", 2, "--profile-target"),
        *("train_log_probs", "--utilization-interval", 1),
    )
    assert ended.code == 0, ended.output
    lines = [json.loads(line) for line in (tmp_path / "outputs/first/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for name in METRICS:
        assert name in lines[0]
    assert lines[0]["train/kl_loss"] == 0, "the reference is the untouched start model"
    assert lines[1]["train/kl_loss"] > 0
    for line in lines:
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert line["train/grad_norm"] > 0
        roles = {name.split("/")[2] for name in line if name.startswith("perf/process/")}
        assert {"driver", "trainer", "rollout", "engine", "router"} <= roles
        assert any(name.startswith("perf/host/") for name in line)
    assert list((tmp_path / "outputs/first").glob("events.out.tfevents.*"))
    assert "never read" not in ended.output
    with gzip.open(tmp_path / "outputs/first/profiles/train_log_probs.rollout1.actor0.json.gz", "rt") as file:
        assert any(event["name"] == "train_log_probs" for event in json.load(file)["traceEvents"])


@pytest.mark.timeout(900)
def test_the_second_command_trains_saves_and_warns_that_nothing_is_evaluated(tmp_path, tiny_model_dir):
    model, data = tiny_model_dir("qwen3"), write_sums(tmp_path / "train.jsonl", 8, messages=True)
    ended = run_training(
        tmp_path,
        *tiny_arguments(model, data),
        *("--actor-num-nodes", 1, "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--use-kl-loss"),
        *("--kl-loss-coef", 0.001, "--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
        *("--num-rollout", 1, "--save-interval", 100, "--eval-interval", 50, "--run-name", "second"),
    )
    assert ended.code == 0, ended.output
    assert "--eval-interval" in ended.output
    checkpoints = tmp_path / "outputs/second/checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert (checkpoints / "iter_0000000" / "trainer").is_dir()


@pytest.mark.timeout(900)
def test_the_colocated_command_trains_with_its_defaults(tmp_path, tiny_model_dir):
    """No batch sizes, no reward type, no number of rollouts: 32 prompts of 8 samples, graded by their labels."""
    model, data = tiny_model_dir("qwen3"), write_sums(tmp_path / "train.jsonl", 32)
    ended = run_training(
        tmp_path,
        *("--colocate", "--actor-num-gpus-per-node", 1, "--sglang-mem-fraction-static", 0.4),
        *("--hf-checkpoint", model, "--prompt-data", data, "--rollout-max-response-len", 6),
        *("--run-name", "colocated"),
    )
    assert ended.code == 0, ended.output
    lines = (tmp_path / "outputs/colocated/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1
    metrics = json.loads(lines[0])
    assert metrics["rollout/raw_reward"] < 0.5
    for phase in ("rollout", "training", "update"):
        assert 0 < metrics[f"perf/memory/{phase}/engine_rss_gib"] < 8
        assert 0 < metrics[f"perf/memory/{phase}/trainer_rss_gib"] < 8
    assert metrics["perf/offload_time"] > 0
    options = yaml.safe_load((tmp_path / "outputs/colocated/args.yaml").read_text())
    assert options["offload_train"] and options["offload_rollout"]
