"""The example of agents that bring their own loop: unmodified clients of both APIs are trained for a few steps."""

import json

import pyarrow.parquet
import pytest

from tests.e2e.running import metrics_of, run_example


@pytest.mark.timeout(900)
def test_unmodified_clients_of_openai_and_anthropic_are_trained(tmp_path):
    outputs = tmp_path / "outputs"
    sizes = ("--num-rollout", 2, "--rollout-batch-size", 8, "--n-samples-per-prompt", 4)
    printed = run_example("black_box_agent", outputs, *sizes, timeout=850)
    lines = metrics_of(outputs / "black-box-agent")
    assert len(lines) == 2 and any(line["train/grad_norm"] > 0 for line in lines)
    for line in lines:
        assert (
            line["multi_turn/turns/max"] >= 2
            and line["multi_turn/inserted_tokens/max"] > 0
            and line["multi_turn/branches"] == 0
        )
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert line["rollout/num_failed_samples"] == 0 and "rollout/num_text_only_samples" not in line
    rows = pyarrow.parquet.read_table(outputs / "black-box-agent/rollouts/000000.parquet").to_pylist()
    assert all(row["newest_weight_version"] >= 0 for row in rows), "inserted tokens have none"
    several = set()
    for row in rows:
        metadata = json.loads(row["metadata"])
        calls = [call for message in metadata["messages"] for call in message.get("tool_calls") or []]
        if calls:
            several.add(metadata["client"])
            assert calls[0]["function"]["name"] == "add" and "tool" in row["response"]
    assert several == {"openai", "anthropic"}
    assert "mean reward, with anthropic" in printed
