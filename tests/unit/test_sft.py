"""Supervised fine-tuning: its loss, its rows, its samples, and which processes it needs."""

import json

import numpy as np
import pytest
import torch

from colloid.algorithms.sft import sft_objective
from colloid.config import parse
from colloid.config.plan import describe_plan
from colloid.config.sft import serves
from colloid.data.prompts import PromptFormat, load_tokenizer
from colloid.data.sample import Sample
from colloid.data.sft import end_token_ids, load_conversations
from colloid.data.source import RolloutDataSource
from colloid.errors import DataError
from colloid.rollout.batching import has_gradient, rollout_batch
from colloid.rollout.sft import fill
from colloid.training.micro_batch import make_micro_batch

FORMAT = PromptFormat(input_key="messages")


def chat(*texts, **more):
    roles = ("user", "assistant")
    return [{"role": roles[row % 2], "content": text, **(more if row % 2 else {})} for row, text in enumerate(texts)]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plan(text=""):
    return parse(["--dry-run", "--device", "cpu", "--hf-checkpoint", "org/none", *text.split()])


def sft_samples(tokenizer, *conversations):
    samples = [Sample(index=row, group_index=row, prompt=messages) for row, messages in enumerate(conversations)]
    for sample in samples:
        fill(sample, tokenizer, FORMAT, [])
    return samples


@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_is_the_mean_over_conversations_or_over_tokens(tiny_model_dir, per_token):
    tokenizer = load_tokenizer(str(tiny_model_dir("qwen3", hidden=32, layers=1)))
    samples = sft_samples(
        tokenizer, chat("a", "b"), chat("a", "it is fifteen", "c", "d"), chat("What?", "Nothing at all.")
    )
    args = plan("--loss-type sft_loss --rollout-batch-size 3" + " --calculate-per-token-loss" * per_token)
    batch = rollout_batch(args, samples)
    assert has_gradient(args, batch).all()
    lp = -torch.rand(len(batch.loss_mask), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    of_samples = [
        -lp[a:b][torch.from_numpy(batch.loss_mask[a:b]) == 1]
        for a, b in zip(batch.response_offsets[:-1], batch.response_offsets[1:], strict=True)
    ]
    expected = torch.cat(of_samples).mean() if per_token else torch.stack([one.mean() for one in of_samples]).mean()
    total, gradient = 0.0, torch.zeros_like(lp)
    for rows in ([1], [2, 0]):
        micro_batch = make_micro_batch(batch, np.asarray(rows))
        values = torch.where(micro_batch.loss_mask, lp[micro_batch.response_index], -torch.inf).requires_grad_()
        loss, metrics = sft_objective(values, micro_batch.loss_mask, micro_batch.token_weights.double(), 0.5)
        loss.backward()
        assert torch.isfinite(values.grad).all() and not values.grad[~micro_batch.loss_mask].any()
        gradient[micro_batch.response_index] = values.grad
        total += metrics["loss"][0].item()
        assert metrics["loss"][1] == 0.5
    assert total == pytest.approx(expected.item(), abs=1e-6)
    assert (-gradient.sum()).item() == pytest.approx(1.0, abs=1e-6), "the weights of a step add up to 1"


def test_samples_hold_the_conversation_up_to_its_last_trained_token(tiny_model_dir):
    tokenizer = load_tokenizer(str(tiny_model_dir("qwen3", hidden=32, layers=1)))
    (sample,) = sft_samples(tokenizer, chat("a", "b", "c", "d"))
    assert sample.response == "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>"
    assert len(sample.loss_mask) == sample.response_length < len(sample.tokens)
    assert sample.reward is None and sample.status is Sample.Status.COMPLETED


def test_rows_are_read_checked_and_filtered(tmp_path, tiny_model_dir, caplog):
    model = tiny_model_dir("qwen3", hidden=32, layers=1)
    tokenizer = load_tokenizer(str(model))
    path = write(tmp_path / "a.jsonl", {"messages": chat("a", "b")}, {"messages": chat("a", "b " * 200)})
    limited = PromptFormat(input_key="messages", max_tokens=50)
    found = load_conversations(path, tokenizer, limited)
    assert (len(found), found.num_filtered) == (1, 1) and "1 of 2 conversations are longer than 50" in caplog.text
    prompt = tokenizer.apply_chat_template(chat("a"), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(found.rows[0].token_ids) == prompt
    for row, message in (
        ({"messages": "a text"}, "a.jsonl:1: 'messages' is a text, and SFT needs a list of messages"),
        ({"messages": chat("a")}, "a.jsonl:1: no message of the assistant's is to be trained"),
        ({"prompt": "a"}, "a.jsonl:1: no key 'messages'"),
    ):
        with pytest.raises(DataError, match=message):
            load_conversations(write(path, row), tokenizer, FORMAT)
    with pytest.raises(DataError, match="all 1 conversations are longer than 2 tokens"):
        load_conversations(
            write(path, {"messages": chat("a", "b")}), tokenizer, PromptFormat(input_key="messages", max_tokens=2)
        )
    assert end_token_ids(str(model)) == [tokenizer.eos_token_id]


def test_a_sample_in_flight_is_whole_again_after_a_resume(tmp_path, tiny_model_dir):
    model = tiny_model_dir("qwen3", hidden=32, layers=1)
    data = write(tmp_path / "a.jsonl", {"messages": chat("a", "b")}, {"messages": chat("c", "d")})
    args = parse(
        [*("--hf-checkpoint", str(model), "--prompt-data", str(data), "--input-key", "messages", "--device", "cpu")]
        + ["--loss-type", "sft_loss", "--rollout-batch-size", "1"]
    )
    tokenizer = load_tokenizer(str(model))
    source = RolloutDataSource(args)
    ((sample,),) = source.get_samples(1)
    fill(sample, tokenizer, FORMAT, [])
    state = json.loads(json.dumps(source.state_dict(), default=np.ndarray.tolist))
    resumed = RolloutDataSource(args)
    resumed.load_state_dict(state)
    ((again,),) = resumed.get_samples(1)
    fill(again, tokenizer, FORMAT, [])
    assert again == sample


@pytest.mark.parametrize(
    ("options", "engines"),
    [
        ("", True),
        ("--loss-type sft_loss", False),
        ("--loss-type sft_loss --eval-interval 2", False),
        ("--loss-type sft_loss --eval-interval 2 --eval-prompt-data a a.jsonl", True),
        ("--loss-type sft_loss --rollout-function-path my.module.function", True),
    ],
)
def test_engines_run_only_where_something_is_generated(options, engines):
    args = plan(options)
    assert serves(args) == engines
    assert ("none (SFT without evaluation)" in describe_plan(args)) != engines
    assert args.n_samples_per_prompt == (1 if options else 8)
