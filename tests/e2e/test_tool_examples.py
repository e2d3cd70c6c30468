"""The examples of tools: a warmed-up tiny model learns to search, and to run code, rather than to guess."""

import pyarrow.parquet
import pytest

from tests.e2e.running import metrics_of, run_example


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("example", "call"), [("search_r1", "<search>"), ("retool", "<code>")])
def test_the_example_raises_its_reward(example, call, tmp_path):
    outputs = tmp_path / "outputs"
    printed = run_example(example, outputs, "--run-name", "run", "--num-rollout", 8, timeout=400)
    lines = metrics_of(outputs / "run")
    reward = [line["rollout/raw_reward"] for line in lines]
    assert reward[0] < 0.6 and reward[-1] > reward[0] + 0.2
    assert f"{reward[0]:.3f} -> {reward[-1]:.3f}" in printed
    assert lines[-1]["multi_turn/turns/mean"] > lines[0]["multi_turn/turns/mean"]
    assert lines[0]["train/train_rollout_logprob_abs_diff"] < 1e-3, "the weights are those that sampled all turns"

    samples = pyarrow.parquet.read_table(outputs / "run/rollouts/000000.parquet").to_pylist()
    used = [sample for sample in samples if call in sample["response"]]
    assert 0 < len(used) < len(samples)
    assert max(sample["reward"] for sample in used) == 1.0
