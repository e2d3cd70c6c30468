"""Commands as users type them, through the shell, and what `--dry-run` and `--help` print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colloid.config.help import markdown

ROOT = Path(__file__).resolve().parents[2]
FIRST = (
    "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --advantage-estimator grpo --use-kl-loss "
    "--kl-loss-coef 0.001 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 3000 "
    "--prompt-data data.jsonl ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}"
)
SECOND = (
    "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo --use-kl-loss "
    "--kl-loss-coef 0.001 --prompt-data train.jsonl --input-key prompt --label-key label --apply-chat-template "
    "--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 3000 --save-interval 100 "
    "--eval-interval 50 ${MODEL_ARGS[@]}"
)
FIFTH = (
    "--colocate --actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.4 ${MODEL_ARGS[@]} --prompt-data train.jsonl"
)
SIXTH = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --num-layers 32 --hidden-size 4096 "
    "--sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO --advantage-estimator grpo"
)


def shell(options: str, model: str | None, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    source = f"source {ROOT}/scripts/models/{model}.sh; " if model else ""
    command = f"{source}{sys.executable} {ROOT}/train.py {options}"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_CACHE": str(cwd), **environment}
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (FIRST, ["4 × embedded", "4 ranks (DP 4)", "32 prompts × 8 samples = 1 step × 256", "3000"]),
        (SECOND, ["8 × embedded", "8 ranks (DP 8)", "each 100 rollouts", "apply_chat_template: True"]),
        (FIFTH, ["8 device slots", "colocated", "sglang_mem_fraction_static: 0.4", "1 × prompts / 32"]),
    ],
)
@pytest.mark.parametrize("model", ["qwen3-4B", "smollm2-135M"])
def test_commands_as_they_stand_are_planned(tmp_path, options, words, model):
    done = shell(options + " --dry-run", model, tmp_path, COLLOID_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout
    assert not (tmp_path / "outputs").exists()


def test_the_three_categories_together_are_planned(tmp_path):
    done = shell(SIXTH + " --dry-run", None, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sglang_log_level: info" in done.stdout and "2 ranks (TP 2)" in done.stdout
    assert "would refuse" not in done.stdout


def test_the_model_script_takes_the_checkpoint_from_the_environment(tmp_path, tiny_model_dir):
    other = tiny_model_dir("qwen3")
    done = shell("--prompt-data x.jsonl --dry-run ${MODEL_ARGS[@]}", "qwen3-4B", tmp_path, HF_CHECKPOINT=str(other))
    assert done.returncode == 2 and "--hidden-size 2560 but the model has 64" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rolout-batch-size 4", ["error:", "--rolout-batch-size", "did you mean --rollout-batch-size?"]),
        ("--prompt-data none.jsonl --hf-checkpoint none", ["error:", "--hf-checkpoint none", "no such directory"]),
        ("--rollout-batch-size 3 --n-samples-per-prompt 2 --global-batch-size 4", ["3 × 2 = 6", "4"]),
        ("--use-distributed-post", ["error: --use-distributed-post is not supported: one process"]),
    ],
)
def test_mistakes_end_with_2_and_no_traceback(tmp_path, options, words):
    done = shell(options, None, tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_help_lists_every_option_of_its_category(tmp_path):
    from colloid.config.tables import tables

    for category, option in [("colloid", "--help"), ("megatron", "--help-megatron"), ("router", "--help-router")]:
        done = shell(option, None, tmp_path)
        words = set(done.stdout.replace(",", " ").split())
        assert done.returncode == 0
        assert {row.flag for row in tables().options if row.category == category} <= words


def test_what_is_made_from_tables_is_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "make_model_scripts.py"), "--check"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    assert (ROOT / "docs" / "options.md").read_text() == markdown()
