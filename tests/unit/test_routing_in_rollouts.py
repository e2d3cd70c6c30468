"""Experts that the engine chose, of samples that were made in several requests or by the user's functions."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from colloid.config import parse
from colloid.errors import DataError
from colloid.rollout.manager import RolloutManager
from tests.fake_engine import FakeEngine
from tests.parallel.family_models import make_family
from tests.tiny import make_tiny_tokenizer

TURNS = """
async def custom_generate(args, sample, sampling_params, evaluation=False):
    conversation = [{"role": "user", "content": sample.prompt}]
    for turn in range(2 + sample.index % 2):
        conversation.append({"role": "assistant", "content": await generate_single(conversation)})
        conversation.append({"role": "tool", "content": f"result {turn}"})
        if sample.index == 3 and not turn:  # leaves what it said first
            conversation = [{"role": "user", "content": sample.prompt + " Once more."}]
    sample.reward = float(sample.index)
    return sample
"""
AGENT = """
import aiohttp

from colloid.agents import session


async def custom_generate(args, sample, sampling_params, evaluation=False):
    async with session(args, sample, sampling_params) as episode:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {episode.api_key}"}) as client:
            messages = [{"role": "user", "content": sample.prompt}]
            for again in ("Sure?", "Really?"):
                body = {"model": "policy", "messages": messages}
                async with client.post(f"{episode.base_url}/chat/completions", json=body) as answer:
                    messages.append((await answer.json())["choices"][0]["message"])
                messages.append({"role": "user", "content": again})
    return episode.samples(reward=float(sample.index))
"""
CONVERT = """
def convert_samples_to_train_data(args, samples):
    rows = [sample for sample in samples for _ in range(2)][::-1]
    return {
        "tokens": [row.tokens for row in rows],
        "response_lengths": [row.response_length for row in rows],
        "rewards": [row.reward for row in rows],
        "loss_masks": [row.loss_mask for row in rows],
        "sample_indices": [row.index for row in rows],
        "rollout_routed_experts": [row.rollout_routed_experts for row in rows],
    }
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_tiny_tokenizer(path, 300)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return make_family(path, "qwen3_moe", vocab_size=300, num_hidden_layers=2, **ends)


@pytest.fixture
def options(model, tmp_path):
    """`options(*flags)` of a run; text in place of a path is written to a file."""

    def make(*flags):
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "label": "2"}) + "\n" for n in range(4)))
        given = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--use-rollout-routing-replay"]
        given += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "2"]
        given += ["--rollout-max-response-len", "30", "--outputs-dir", str(tmp_path / "outputs")]
        for flag in flags:
            if "\n" in flag:
                path = tmp_path / f"hook_{len(list(tmp_path.glob('*.py')))}.py"  # a file is imported once
                path.write_text(flag)
                flag = str(path)
            given.append(flag)
        return parse(given, "train")

    return make


def experts_of(args, ids):
    """[tokens - 1, layers, chosen]: by token and layer, so that they say whose they are."""
    layers, chosen = np.arange(args.num_layers), np.arange(args.moe_router_topk)
    return (np.asarray(ids[:-1])[:, None, None] + 3 * layers[:, None] + chosen) % args.num_experts


def columns_of(args, engine, rollouts=1):
    """Of the last of some rollouts."""

    def more(payload, ids):
        assert payload["return_routed_experts"] is True
        experts = experts_of(args, payload["input_ids"] + ids).astype("<i4")
        return {"routed_experts": base64.b64encode(experts.tobytes()).decode()}

    engine.more = more

    async def run():
        async with engine.serve():
            manager = RolloutManager(args)
            await manager.start(engine.url, [engine.url], "key")
            try:
                for rollout in range(rollouts):
                    result = await manager.generate(rollout, rollout + 1)
                return result.batches[0].samples
            finally:
                await manager.close()

    return asyncio.run(run())


def assert_each_has_its_own(args, columns):
    for row in range(columns.num_samples):
        rows = slice(columns.offsets[row], columns.offsets[row + 1])
        tokens, experts = columns.tokens[rows].tolist(), columns.routed_experts[rows]
        mask = columns.loss_mask[columns.response_offsets[row] : columns.response_offsets[row + 1]]
        read = len(tokens) - len(mask) + int(np.flatnonzero(mask)[-1])
        assert np.array_equal(experts[:read], experts_of(args, tokens[: read + 1]))


def test_turns_of_a_conversation_and_branches_that_it_left_have_those_of_all_their_tokens(options):
    args = options("--custom-generate-function-path", TURNS)
    engine = FakeEngine(lambda payload: [60 + len(payload["input_ids"]) % 50, 61])
    columns = columns_of(args, engine)
    assert columns.num_samples == 5 and len(engine.requests) == 10
    assert_each_has_its_own(args, columns)


def test_an_agent_with_its_own_loop_has_those_of_all_tokens_of_its_episode(options):
    args = options("--custom-generate-function-path", AGENT)
    engine = FakeEngine(lambda payload: [60 + len(payload["input_ids"]) % 50, 61])
    columns = columns_of(args, engine)
    assert columns.num_samples == 4 and len(engine.requests) == 8
    assert_each_has_its_own(args, columns)


def test_rows_that_a_function_made_have_those_that_it_gives(options):
    args = options("--rm-type", "random", "--custom-convert-samples-to-train-data-path", CONVERT)
    columns = columns_of(args, FakeEngine(lambda payload: [60 + len(payload["input_ids"]) % 50, 61]))
    assert columns.num_samples == 8
    assert_each_has_its_own(args, columns)
    without = "\n".join(line for line in CONVERT.splitlines() if "routed" not in line)
    with pytest.raises(DataError, match="8 of 8 samples do not say .*convert-samples-to-train-data-path return them"):
        columns_of(
            options("--rm-type", "random", "--custom-convert-samples-to-train-data-path", without + "\n"),
            FakeEngine(lambda payload: [61]),
        )


def test_a_sample_that_an_abort_stopped_has_those_of_all_its_tokens_once_it_goes_on(options, model):
    args = options("--rm-type", "random", "--partial-rollout", "--over-sampling-batch-size", "3")
    slow = AutoTokenizer.from_pretrained(model)("1 + 1 =")["input_ids"]
    engine = FakeEngine(lambda payload: [70, 71, 72, 61], lambda payload: 30.0 * (payload["input_ids"] == slow))
    columns = columns_of(args, engine, rollouts=2)
    assert len(engine.aborts) >= 2
    assert sum(request["input_ids"] == [*slow, 70] for request in engine.requests) == 2, "they went on"
    assert_each_has_its_own(args, columns)
