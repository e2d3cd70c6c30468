"""Users' commands on several ranks: 4 + 4 device slots, and what they add when memory is short."""

import pytest

from tests.e2e.running import metrics_of, run_training, tiny_arguments, write_sums
from tests.parallel.family_models import make_family
from tests.tiny import make_tiny_tokenizer

pytestmark = pytest.mark.timeout(900)


def test_four_trainer_ranks_and_four_engines(tmp_path, tiny_model_dir):
    """The first command: four data-parallel ranks, and four engines behind the router."""
    data = write_sums(tmp_path / "data.jsonl", 16)
    ended = run_training(
        tmp_path,
        *tiny_arguments(tiny_model_dir("qwen3"), data),
        *("--actor-num-nodes", 1, "--actor-num-gpus-per-node", 4, "--rollout-num-gpus", 4),
        *("--use-kl-loss", "--kl-loss-coef", 0.001, "--global-batch-size", 16, "--num-rollout", 2),
        *("--run-name", "run", "--check-weight-update-equal"),
        timeout=600,
    )
    assert ended.code == 0, ended.output
    assert "weight version 3: 24 tensors equal on all engines" in ended.output
    for line in metrics_of(tmp_path / "outputs/run"):
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert line["train/grad_norm"] > 0


def test_recomputation_micro_batches_of_one_and_sequence_parallelism(tmp_path, tiny_model_dir):
    data = write_sums(tmp_path / "data.jsonl", 16)
    ended = run_training(
        tmp_path,
        *tiny_arguments(tiny_model_dir("qwen3"), data),
        *("--actor-num-gpus-per-node", 4, "--rollout-num-gpus", 1, "--num-rollout", 2),
        *("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
        *("--recompute-activations", "--micro-batch-size", 1, "--sequence-parallel"),
        *("--run-name", "run", "--check-weight-update-equal"),
        timeout=600,
    )
    assert ended.code == 0, ended.output
    for line in metrics_of(tmp_path / "outputs/run"):
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert line["train/grad_norm"] > 0
    assert "never read" not in ended.output


def test_latent_attention_and_experts_over_two_ranks(tmp_path):
    """DeepSeek's architecture with expert parallelism, from rollout to weight sync."""
    model = make_family(tmp_path / "model", "deepseek_v3", vocab_size=512)
    make_tiny_tokenizer(model)
    data = write_sums(tmp_path / "data.jsonl", 16)
    ended = run_training(
        tmp_path,
        *tiny_arguments(model, data),
        *("--actor-num-gpus-per-node", 2, "--expert-model-parallel-size", 2, "--num-rollout", 2),
        *("--use-kl-loss", "--kl-loss-coef", 0.001, "--run-name", "run", "--check-weight-update-equal"),
        timeout=600,
    )
    assert ended.code == 0, ended.output
    first, second = metrics_of(tmp_path / "outputs/run")
    assert first["train/kl_loss"] == 0 < second["train/kl_loss"]
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in (first, second)) < 1e-4
