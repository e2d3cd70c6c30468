"""The functions that `docs/customization.md` shows, in a run."""

import re

import pyarrow.parquet
import pytest
import torch

from tests.e2e.running import ROOT, metrics_of, run_training, tiny_arguments, write_sums


def _example(heading: str) -> str:
    """The first Python block under a heading of the page."""
    page = (ROOT / "docs/customization.md").read_text()
    return re.search(rf"## {heading}\n.*?```python\n(.*?)```", page, re.DOTALL).group(1)


@pytest.mark.timeout(900)
def test_functions_of_ones_own(tmp_path, tiny_model_dir):
    (tmp_path / "my_generate.py").write_text(_example("Generation"))
    (tmp_path / "my_reward.py").write_text(_example("Reward"))
    (tmp_path / "my_trainer.py").write_text(_example("Trainer"))
    data = write_sums(tmp_path / "data.jsonl", 8)
    ended = run_training(
        tmp_path,
        *tiny_arguments(tiny_model_dir("qwen3"), data),
        *("--custom-generate-function-path", "my_generate.py", "--custom-rm-path", "my_reward.py"),
        *("--dynamic-sampling-filter-path", "colloid.rollout.filters.check_reward_nonzero_std"),
        *("--custom-megatron-init-path", "my_trainer.py", "--custom-model-provider-path", "my_trainer.py"),
        *("--custom-megatron-before-log-prob-hook-path", "my_trainer.py"),
        *("--custom-megatron-before-train-step-hook-path", "my_trainer.py"),
        *("--rollout-data-postprocess-path", "my_trainer.py", "--save-debug-train-data", "train/{rollout_id}.pt"),
        *("--num-rollout", 1, "--num-steps-per-rollout", 2, "--lr", 1e-3, "--run-name", "run"),
    )
    assert ended.code == 0, ended.output
    metrics = metrics_of(tmp_path / "outputs/run")[0]
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-4, "both turns are what the engine sampled"
    assert metrics["rollout/num_failed_samples"] == 0
    rows = pyarrow.parquet.read_table(tmp_path / "outputs/run/rollouts/000000.parquet").to_pylist()
    assert any("Once more" in row["response"] for row in rows)
    assert metrics["train/step_1/lr"] == metrics["train/step_0/lr"] / 2 == 5e-4
    trained = torch.load(tmp_path / "train/0.pt", weights_only=True)["rollout_data"]
    assert sorted(set(trained["steps"])) == [0, 1] and len(trained["tokens"]) == len(trained["log_probs"])
