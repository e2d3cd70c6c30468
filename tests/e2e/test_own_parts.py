"""Commands 8, 9 and 10 of what users bring: a reward model, several evaluation sets, and a data source of their own; as
they stand with `--dry-run`, and together for real. (Command 4 is in `test_multi_turn.py`.)
"""

import json

import pytest

from tests.e2e.running import metrics_of, run_training, write_sums
from tests.unit.test_config_commands import shell

CUSTOM_RM = """
class CustomRewardModel:
    def __init__(self, model_path):
        self.model_path = model_path

    def compute_reward(self, prompts, responses):
        return [float(len(response) % 3) for response in responses]
"""
DRAWS = """
import random
from colloid import RolloutDataSource, Sample


class Sums:
    def sample(self, n):
        return [Sample(prompt=f"What is {random.randint(1, 9)} + 1?", label="2") for _ in range(n)]


class MySource(RolloutDataSource):
    def __init__(self):
        self.dataset = Sums()

    def get_samples(self, num_samples):
        return self.dataset.sample(num_samples)
"""
FILTERS = """
from colloid import RolloutDataSourceWithBuffer


class MySource(RolloutDataSourceWithBuffer):
    def buffer_filter(self, args, buffer, num_samples):
        return sorted(buffer, key=lambda group: -group[0].index)[:num_samples]
"""
REWARD = "--custom-rm-path custom_rm.py"
EVALUATION = "--eval-prompt-data aime aime.jsonl --eval-prompt-data gsm8k gsm8k.jsonl --n-samples-per-eval-prompt 16"
SOURCE = "--data-source-path my_source.py"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "custom_rm.py").write_text(CUSTOM_RM)
    (tmp_path / "my_source.py").write_text(DRAWS)
    for name in ("data", "aime", "gsm8k"):
        write_sums(tmp_path / f"{name}.jsonl", 2)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "source", "words"),
    [
        (REWARD, DRAWS, ["custom_rm.py"]),
        (EVALUATION, DRAWS, ["aime", "gsm8k"]),
        (SOURCE, DRAWS, ["my_source.py"]),
        (SOURCE, FILTERS, ["my_source.py"]),
    ],
    ids=["reward model", "evaluation sets", "data source", "buffer filter"],
)
def test_the_command_stands_as_it_is_with_dry_run(files, options, source, words):
    (files / "my_source.py").write_text(source)
    ended = shell(f"--prompt-data data.jsonl ${{MODEL_ARGS[@]}} {options} --dry-run", "qwen3-4B", files)
    assert ended.returncode == 0, ended.stderr
    assert all(word in ended.stdout for word in words), ended.stdout


@pytest.mark.timeout(400)
def test_a_reward_model_a_data_source_and_several_sets_of_ones_own_train_together(files, tiny_model_dir):
    ended = run_training(
        files,
        *(*REWARD.split(), *EVALUATION.split(), *SOURCE.split(), "--hf-checkpoint", tiny_model_dir("qwen3")),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 6, "--num-rollout", 2),
        *("--over-sampling-batch-size", 5, "--lr", 1e-3, "--run-name", "run"),
    )
    assert ended.code == 0, ended.output
    lines = metrics_of(files / "outputs/run")
    trained = [line for line in lines if "train/grad_norm" in line]
    assert len(trained) == 2 and all(line["rollout/num_failed_samples"] == 0 for line in trained)
    assert any(line["train/grad_norm"] > 0 for line in trained)
    evaluated = [line for line in lines if "eval/aime" in line]
    assert len(evaluated) == 2 and all(0 <= line["eval/gsm8k"] <= 2 for line in evaluated), "first and last"
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(files / "outputs/run/rollouts/000000.parquet").to_pylist()
    assert {json.dumps(row["prompt"])[-6:] for row in rows} == {' + 1?"'} and len(rows) >= 16
    assert all(row["reward"] == len(row["response"]) % 3 for row in rows if row["reward"] is not None)
