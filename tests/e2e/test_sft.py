"""Supervised fine-tuning from the command line: the loss falls, and the engine then says the trained text."""

import json

import pytest
import torch
import transformers

from colloid.data.conversations import conversation
from tests.e2e.running import metrics_of, run_training

PAIRS = [("What is 7 + 8?", "It is 15."), ("What is 1 + 1?", "Two!"), ("And you?", "I am fine."), ("Why?", "Because.")]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversations(path):
    rows = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in PAIRS]
    rows[1][:0] = [*rows[0][:1], rows[0][1] | {"step_loss_mask": 0}]
    return write_rows(path, [{"messages": messages} for messages in rows])


def mean_loss(model_dir, data):
    """The mean over conversations of the mean -log p of what is trained, by the plain model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    losses = []
    for line in data.read_text().splitlines():
        found = conversation(json.loads(line)["messages"], tokenizer)
        with torch.no_grad():
            log_probs = model(torch.tensor([found.token_ids])).logits[0].log_softmax(-1)
        of_tokens = [
            -log_probs[at - 1, token].item()
            for at, (token, trained) in enumerate(zip(found.token_ids, found.loss_mask, strict=True))
            if trained
        ]
        losses.append(sum(of_tokens) / len(of_tokens))
    return sum(losses) / len(losses)


@pytest.mark.timeout(240)
def test_the_engine_says_what_was_trained(tmp_path, tiny_model_dir):
    model = tiny_model_dir("qwen3", hidden=64, layers=1)
    data = conversations(tmp_path / "data.jsonl")
    held = write_rows(
        tmp_path / "eval.jsonl", [{"ask": [{"role": "user", "content": one}], "label": two} for one, two in PAIRS]
    )
    (tmp_path / "says.py").write_text(
        "async def reward_func(args, sample, **kw):\n"
        "    return float(sample.response == sample.label and sample.status is sample.Status.COMPLETED)\n"
    )
    ended = run_training(
        tmp_path,
        *("--hf-checkpoint", model, "--prompt-data", data, "--input-key", "messages", "--loss-type", "sft_loss"),
        *("--rollout-batch-size", 4, "--num-rollout", 20, "--lr", 1e-2, "--micro-batch-size", 2),
        *("--eval-prompt-data", "said", held, "--eval-input-key", "ask", "--eval-interval", 20),
        *("--eval-temperature", 0, "--rollout-temperature", 0.5, "--rollout-max-response-len", 32),
        *("--custom-rm-path", "says.py", "--run-name", "run"),
    )
    assert ended.code == 0, ended.output
    lines = metrics_of(tmp_path / "outputs/run")
    loss = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(loss) == 20
    assert loss[0] == pytest.approx(mean_loss(model, data), abs=1e-4), "at temperature 1, whatever the rollout's is"
    assert loss[-1] < 0.1 * loss[0]
    said = [line["eval/said"] for line in lines if "eval/said" in line]
    assert said == [0.0, 1.0], ended.output[-3000:]
    assert f"loss       {loss[0]:.3f} -> {loss[-1]:.3f}" in ended.output
    assert not any("reward" in name for line in lines for name in line)


@pytest.mark.timeout(240)
def test_without_evaluation_there_are_no_engines(tmp_path, tiny_model_dir):
    model = tiny_model_dir("qwen3", hidden=32, layers=1)
    data = conversations(tmp_path / "data.jsonl")
    arguments = [
        *("--hf-checkpoint", model, "--prompt-data", data, "--input-key", "messages", "--loss-type", "sft_loss"),
        *("--calculate-per-token-loss", "--rollout-batch-size", 2, "--num-steps-per-rollout", 2, "--lr", 1e-2),
        *("--rollout-shuffle", "--save", "checkpoints", "--load", "checkpoints", "--save-interval", 1),
    ]
    whole = run_training(tmp_path, *arguments, "--num-epoch", 2, "--run-name", "whole")
    assert whole.code == 0, whole.output
    assert not (tmp_path / "outputs/whole/engines").exists()
    marker = tmp_path / "checkpoints/latest_checkpointed_iteration.txt"
    marker.write_text("1")
    resumed = run_training(tmp_path, *arguments, "--num-epoch", 2, "--run-name", "resumed")
    assert resumed.code == 0, resumed.output
    first, second = (metrics_of(tmp_path / "outputs" / name) for name in ("whole", "resumed"))
    assert len(first) == 4 and first[2:] == second, "two rollouts an epoch; a resume goes on where it was"
