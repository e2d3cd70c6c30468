"""On-policy distillation: the policy comes nearer to its teacher, on its own samples and without any reward."""

import pytest

from tests.e2e.running import metrics_of, run_training, write_sums


@pytest.mark.timeout(240)
def test_the_kl_to_the_teacher_falls(tmp_path, tiny_model_dir):
    student, teacher = (tiny_model_dir("qwen3", hidden=32, layers=1, vocab=300, seed=seed) for seed in (0, 1))
    (tmp_path / "nothing.py").write_text("async def reward_func(args, sample, **kw):\n    return 0.0\n")
    ended = run_training(
        tmp_path,
        *("--hf-checkpoint", student, "--prompt-data", write_sums(tmp_path / "data.jsonl", 8), "--lr", 1e-2),
        *("--custom-rm-path", "nothing.py", "--rollout-temperature", 0.8, "--rollout-max-response-len", 8),
        *("--rollout-batch-size", 8, "--n-samples-per-prompt", 8),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 1024),
        *("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", teacher),
        *("--num-rollout", 15, "--run-name", "run"),
    )
    assert ended.code == 0, ended.output
    kl = [line["train/opd_kl"] for line in metrics_of(tmp_path / "outputs/run")]
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3])
