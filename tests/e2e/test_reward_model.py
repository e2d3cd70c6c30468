"""A reward model of one's own, as users bring it, and rewards that a function of theirs shapes."""

import json

import pyarrow.parquet
import pytest

from tests.e2e.running import metrics_of, run_training, tiny_arguments

CUSTOM_RM = """
import json
import os


class CustomRewardModel:
    def __init__(self, model_path):
        with open(os.path.join(model_path, "config.json")) as file:
            self.vocab = json.load(file)["vocab_size"]
        with open("made.txt", "a") as file:
            file.write(model_path + "\\n")

    def compute_reward(self, prompts, responses):
        assert len(prompts) == len(responses) and all("What is" in prompt for prompt in prompts)
        return [len(set(response)) / self.vocab for response in responses]
"""
POST_PROCESS = """
def post_process(args, samples):
    raw = [sample.reward for sample in samples]
    return raw, [100.0 * (reward - sum(raw) / len(raw)) for reward in raw]
"""


@pytest.mark.timeout(600)
def test_a_class_that_judges_batches_trains_a_policy(tmp_path, tiny_model_dir):
    (tmp_path / "custom_rm.py").write_text(CUSTOM_RM)
    (tmp_path / "shape.py").write_text(POST_PROCESS)
    rows = [{"prompt": f"What is {number}?"} for number in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_model_dir("qwen3")
    arguments = tiny_arguments(model, tmp_path / "data.jsonl")
    place = arguments.index("--rm-type")
    ended = run_training(
        tmp_path,
        *("--custom-rm-path", "custom_rm.py", *arguments[:place], *arguments[place + 2 :]),
        *("--custom-reward-post-process-path", "shape.py", "--num-rollout", 2, "--run-name", "run"),
    )
    assert ended.code == 0, ended.output
    assert (tmp_path / "made.txt").read_text().splitlines() == [str(model)], "loaded once"
    assert "no --custom-rm-model-path" in ended.output
    rows = pyarrow.parquet.read_table(tmp_path / "outputs/run/rollouts/000000.parquet").to_pylist()
    rewards = [row["reward"] for row in rows]
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    assert rewards == [len(set(row["response"])) / vocab for row in rows]
    mean = sum(rewards) / len(rewards)
    assert [row["shaped_reward"] for row in rows] == pytest.approx([100 * (reward - mean) for reward in rewards])
    metrics = metrics_of(tmp_path / "outputs/run")[0]
    assert metrics["rollout/num_failed_samples"] == 0 and metrics["train/grad_norm"] > 0
