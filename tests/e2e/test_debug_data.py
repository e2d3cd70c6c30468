"""Rollouts of streamed prompts, saved by a run without a trainer; then trained without engines, on 1 and 4 ranks."""

import json

import pyarrow.json
import pyarrow.parquet
import pytest

from tests.e2e.running import metrics_of, run_training, tiny_arguments, write_sums

pytestmark = pytest.mark.timeout(900)

OPTIONS = [
    *("--num-rollout", 2, "--num-steps-per-rollout", 2, "--use-kl-loss", "--kl-loss-coef", 0.1),
    *("--entropy-coef", 0.01, "--seed", 7),
]
TRAINED = ("train/loss", "train/grad_norm", "train/kl_loss", "train/entropy_loss", "train/step_1/ppo_kl")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_model_dir):
    """A directory with `0.jsonl` and `1.jsonl`, the model's directory, and the run that generated them."""
    directory = tmp_path_factory.mktemp("generated")
    model, data = tiny_model_dir("qwen3"), write_sums(directory / "data.jsonl", 8)
    data.write_text(data.read_text() + '{"prompt": 3}\n')
    more = pyarrow.json.read_json(write_sums(directory / "more.jsonl", 18))
    pyarrow.parquet.write_table(more, directory / "more.parquet")
    arguments = tiny_arguments(model, data)
    arguments.insert(4, directory / "more.parquet@[-9:]")
    ended = run_training(
        directory,
        *(*arguments, *OPTIONS, "--debug-rollout-only"),
        *("--streaming-data", "--num-data-workers", 1, "--skip-bad-rows", "--prompt-data-weights", 1, 1),
        *("--dump-details", directory / "details", "--run-name", "run"),
    )
    assert ended.code == 0, ended.output
    return directory / "details/rollout_data", model, directory / "outputs/run"


def _train(directory, saved, *arguments):
    files, model, _ = saved
    model_arguments = tiny_arguments(model, "none")
    del model_arguments[2:4]  # no --prompt-data
    ended = run_training(
        directory,
        *(*model_arguments, *OPTIONS, "--debug-train-only", "--run-name", "run", *arguments),
        *("--load-debug-rollout-data", files / "{rollout_id}.jsonl"),
    )
    assert ended.code == 0, ended.output
    return metrics_of(directory / "outputs/run")


@pytest.fixture(scope="module")
def on_one_rank(saved, tmp_path_factory):
    return _train(tmp_path_factory.mktemp("one"), saved)


def test_without_a_trainer_rollouts_are_generated_and_saved_whole(saved):
    files, _, run = saved
    assert sorted(path.name for path in files.iterdir()) == ["0.jsonl", "1.jsonl"]
    samples = [json.loads(line) for line in (files / "1.jsonl").read_text().splitlines()]
    assert len(samples) == 16 and len({sample["group_index"] for sample in samples}) == 4
    assert all(len(sample["rollout_log_probs"]) == sample["response_length"] > 0 for sample in samples)
    metrics = metrics_of(run)
    assert [line["step"] for line in metrics] == [0, 1]
    assert metrics[1]["rollout/raw_reward"] == pytest.approx(sum(s["reward"] for s in samples) / 16)
    assert not any(name.startswith("train/") for line in metrics for name in line)


def test_prompts_were_streamed_from_both_files_and_the_bad_row_is_named(saved):
    files, _, run = saved
    prompts = {json.loads(line)["prompt"] for file in files.iterdir() for line in file.read_text().splitlines()}
    assert len(prompts) == 8 and {prompt[-4:] for prompt in prompts} == {"+ 1?", "+ 2?"}
    assert all("data/num_bad_rows" in line and line["data/epoch"] == 0 for line in metrics_of(run))
    assert "data.jsonl:9: 'prompt' must be a text" in (run / "log.txt").read_text()


def test_without_engines_saved_rollouts_are_trained(saved, on_one_rank):
    metrics = on_one_rank
    generated = metrics_of(saved[2])
    for before, after in zip(generated, metrics, strict=True):
        assert after["rollout/raw_reward"] == before["rollout/raw_reward"]
        assert after["train/train_rollout_logprob_abs_diff"] < (1e-4 if after["step"] == 0 else 1)
        assert after["train/grad_norm"] > 0
    assert "weight_version" not in metrics[0]


def test_four_ranks_compute_what_one_rank_computes(saved, on_one_rank, tmp_path):
    layout = [
        *("--actor-num-gpus-per-node", 4, "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 64, "--log-probs-max-tokens-per-gpu", 128),
        *("--balance-data", "--balance-by-flops"),
    ]
    metrics = _train(tmp_path, saved, *layout)
    for one, four in zip(on_one_rank, metrics, strict=True):
        assert {name: four[name] for name in TRAINED} == {name: pytest.approx(one[name], rel=1e-4) for name in TRAINED}
