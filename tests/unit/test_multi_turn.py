"""Generate functions that hold conversations, against a fake engine: what they sample is what is trained."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from colloid.algorithms.rewards import shape_rewards
from colloid.errors import HookError
from tests.conversations import run_conversations
from tests.fake_engine import FakeEngine, seeded

GROUP = """
import json


def extract_tool_call(text):
    return json.loads(text.split("<call>")[1]) if "<call>" in text else None


def execute_tool(call):
    return str(call["a"] + call["b"])


def compute_reward(conversation, label):
    return float(conversation[-1]["content"] == label)


async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        conversation = sample.prompt
        for _ in range(args.max_turns):
            response = await generate_single(conversation)
            call = extract_tool_call(response)
            conversation.append({"role": "assistant", "content": response})
            if call is None:
                break
            conversation.append({"role": "tool", "content": execute_tool(call)})
            conversation.append({"role": "tool", "content": "and nothing else"})
        sample.response = conversation[-1]["content"]
        sample.reward = compute_reward(conversation, sample.label)
    return samples
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir())


@pytest.fixture
def run(tiny_model_dir, tmp_path):
    """`run(function, engine, *flags)` -> the columns of a rollout of 2 prompts with 2 samples, and its metrics."""

    def make(function, engine, *flags, **more):
        return run_conversations(tiny_model_dir(), tmp_path, function, engine, "--max-turns", "5", *flags, **more)

    return make


def calls_then_answers(tokenizer):
    """The first turn calls a tool, or answers; later turns answer what the tool said."""

    def reply(payload):
        prompt = tokenizer.decode(payload["input_ids"])
        left = int(prompt.split("What is ")[1].split(" +")[0])
        text = f'<call>{{"a": {left}, "b": 1}}' if "tool" not in prompt and seeded(payload, 2) else str(left + 1)
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    return reply


def rows_of(columns):
    for row in range(columns.num_samples):
        tokens = columns.tokens[columns.offsets[row] : columns.offsets[row + 1]].tolist()
        mask = columns.loss_mask[columns.response_offsets[row] : columns.response_offsets[row + 1]].tolist()
        log_probs = columns.rollout_log_probs[columns.response_offsets[row] : columns.response_offsets[row + 1]]
        yield tokens, mask, log_probs


def test_a_function_of_the_whole_group_trains_what_it_sampled(run, tokenizer):
    engine = FakeEngine(calls_then_answers(tokenizer))
    columns, metrics = run(GROUP, engine)
    assert (columns.raw_rewards == 1.0).all() and columns.num_samples == 4
    turns = []
    for tokens, mask, log_probs in rows_of(columns):
        response = tokens[len(tokens) - len(mask) :]
        sampled = [token for token, trained in zip(response, mask, strict=True) if trained]
        said = tokenizer.decode(sampled)
        turns.append(said.count("<|im_end|>"))
        expected = [-0.25 - (token % 7) / 8 if trained else 0.0 for token, trained in zip(response, mask, strict=True)]
        np.testing.assert_allclose(log_probs, expected)
        if turns[-1] == 2:
            assert "<|im_end|>\n<|im_start|>tool\n" in tokenizer.decode(response)
            assert "tool" not in said and "nothing else" not in said and said.startswith("<call>{")
    assert set(turns) == {1, 2} and len(engine.requests) == sum(turns)
    seeds = [request["sampling_params"]["sampling_seed"] for request in engine.requests]
    assert len(set(seeds)) == len(seeds)
    # What the engine was asked for is what stands before each sampled turn.
    asked = {tuple(request["input_ids"]) for request in engine.requests}
    for tokens, mask, _ in rows_of(columns):
        before, start = 0, len(tokens) - len(mask)
        for place, trained in enumerate(mask):
            if trained and not before:
                assert tuple(tokens[: start + place]) in asked
            before = trained


@pytest.mark.parametrize(
    "conversation",
    [
        "list(sample.prompt)",
        '[{"role": "system", "content": "Be brief."}, *sample.prompt]',
        '[{"role": "user", "content": sample.prompt}]',
    ],
)
def test_a_conversation_is_known_by_what_it_holds_of_the_prompt(run, tokenizer, conversation):
    text = "sample.prompt}" in conversation
    function = GROUP.replace("conversation = sample.prompt", f"conversation = {conversation}")
    engine = FakeEngine(calls_then_answers(tokenizer))
    columns, _ = run(function, engine, prompt="What is 3 + 1?" if text else None)
    assert columns.num_samples == 4 and not np.isnan(columns.raw_rewards).any()
    assert (columns.response_lengths > 0).all()


def test_a_conversation_of_nobody_is_an_error_that_says_what_to_give(run, tokenizer):
    function = "import copy\n" + GROUP.replace(
        "conversation = sample.prompt", "conversation = copy.deepcopy(sample.prompt)"
    )
    with pytest.raises(HookError, match="of which of the 2 samples is this conversation.*sample.prompt"):
        run(function, FakeEngine(calls_then_answers(tokenizer)))
    function = GROUP.replace("return samples", "return samples[:1]")
    with pytest.raises(HookError, match=r"all 2 samples that it was given; what it returned lacks samples \[1\]"):
        run(function, FakeEngine(calls_then_answers(tokenizer)))


GATHERED = """
import asyncio

from colloid.rollout import generate_single


async def hold(sample, turns):
    conversation = sample.prompt
    for _ in range(turns):
        conversation.append({"role": "assistant", "content": await generate_single(conversation)})
        conversation.append({"role": "user", "content": f"Again, {sample.index}?"})
    sample.reward = float(sample.index)


async def custom_generate(args, samples, evaluation=False):
    await asyncio.gather(*(hold(sample, 1 + sample.index) for sample in samples))
    return samples[::-1]
"""


def test_the_conversations_of_a_group_may_be_held_at_the_same_time(run, tokenizer):
    engine = FakeEngine(calls_then_answers(tokenizer), delay=lambda payload: 0.01)
    columns, _ = run(GATHERED, engine)
    assert engine.max_running >= 4
    for sample_id, raw, (tokens, mask, _) in zip(
        columns.sample_ids, columns.raw_rewards, rows_of(columns), strict=True
    ):
        response = tokenizer.decode(tokens[len(tokens) - len(mask) :])
        assert response.count(f"Again, {sample_id}?") == sample_id == raw, "what comes behind the last turn is not kept"
        assert response.count("Again") == sample_id


def test_a_group_that_an_abort_stops_is_asked_again_from_its_prompts(run, tokenizer):
    slow = {2, 3}

    def delay(payload):
        left = int(tokenizer.decode(payload["input_ids"]).split("What is ")[1].split(" +")[0])
        return 30.0 if left in slow and "tool" in tokenizer.decode(payload["input_ids"]) else 0.0

    engine = FakeEngine(calls_then_answers(tokenizer), delay)
    function = GROUP.replace("if call is None:", "if call is None and 'tool' in str(conversation):")
    function = function.replace("execute_tool(call)}", '"x"}')
    flags = ("--over-sampling-batch-size", "4", "--rollout-seed", "1")

    async def twice(manager):
        first = await manager.generate(0, 3)
        slow.clear()
        return first, await manager.generate(1, 3)

    first, second = run(function, engine, *flags, body=twice)
    assert engine.aborts, "the slow groups were stopped in their second turn"
    both = [result.batches[0].samples for result in (first, second)]
    assert sorted(index for columns in both for index in columns.sample_ids.tolist()) == list(range(8))
    for columns in both:
        assert not np.isnan(columns.raw_rewards).any()
        for tokens, mask, _ in rows_of(columns):
            prompt = tokenizer.decode(tokens[: len(tokens) - len(mask)])
            assert prompt.count("<|im_start|>") == 2, "the prompt alone: one question, and the assistant's turn"


def test_a_function_that_raises_fails_its_group(run, tokenizer, caplog):
    function = GROUP.replace(
        "    for sample in samples:\n", "    for sample in samples:\n        sample.index == 3 and oops\n"
    )
    columns, metrics = run(function, FakeEngine(calls_then_answers(tokenizer)))
    assert set(columns.sample_ids[np.isnan(columns.raw_rewards)].tolist()) == {2, 3}
    assert metrics["rollout/num_failed_samples"] == 2 and "oops" in caplog.text


@pytest.mark.timeout(60)
def test_a_function_that_lets_a_cancellation_pass_fails_its_group(run, tokenizer, caplog):
    function = "import asyncio\n" + GROUP.replace(
        "    for sample in samples:\n",
        "    for sample in samples:\n        if sample.index == 3:\n            raise asyncio.CancelledError\n",
    )
    columns, metrics = run(function, FakeEngine(calls_then_answers(tokenizer)))
    assert set(columns.sample_ids[np.isnan(columns.raw_rewards)].tolist()) == {2, 3}
    assert metrics["rollout/num_failed_samples"] == 2 and "asyncio.CancelledError" in caplog.text


ONE = """
from colloid.rollout import generate_single


async def generate(args, sample, sampling_params):
    messages = [{"role": "system", "content": "Be brief."}, *sample.prompt]
    first = await generate_single(messages, max_new_tokens=4)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
    await generate_single(messages)
    if sample.index == 0:
        messages[1] = {"role": "user", "content": "What is 7 + 1?"}
        await generate_single(messages[:2])
    return sample
"""


def test_a_function_of_one_sample_may_change_its_history_and_its_parts_weigh_as_one(run, tokenizer):
    engine = FakeEngine(calls_then_answers(tokenizer))
    columns, metrics = run(ONE, engine, "--rm-type", "random")
    columns = columns.select(np.argsort(columns.sample_ids, kind="stable"))
    assert columns.sample_ids.tolist() == [0, 0, 1, 2, 3]
    parts = columns.sample_ids == 0
    assert set(columns.rollout_ids[parts].tolist()) == {0} and len(set(columns.raw_rewards[parts].tolist())) == 1
    weights = columns.loss_weights * [sum(mask) for _, mask, _ in rows_of(columns)]
    np.testing.assert_allclose([weights[:2].sum(), *weights[2:]], 0.25)
    assert [request["sampling_params"]["max_new_tokens"] for request in engine.requests].count(4) == 4


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "rloo", "reinforce_plus_plus_baseline"])
def test_the_parts_of_a_rollout_have_one_vote_in_their_group(estimator):
    def shaped(raw, rollouts, **options):
        raw, rollouts = torch.tensor(raw, dtype=torch.float64), torch.tensor(rollouts)
        valid = torch.isfinite(raw)
        groups = torch.zeros_like(rollouts)
        return shape_rewards(raw, groups, estimator, valid=valid, rollout_ids=rollouts, **options).tolist()

    one, two, three = shaped([1.0, 0.0, 0.5], [7, 8, 9])
    assert shaped([1.0, 0.0, 1.0, 0.5, 1.0, math.nan], [7, 8, 7, 9, 7, 7]) == pytest.approx(
        [one, two, one, three, one, 0]
    )


def test_text_from_elsewhere_is_tokenised_once_and_counted(run, tokenizer):
    function = """
async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        sample.response, sample.reward = f"It is {sample.label}.", 1.0 * sample.index
    return samples
"""
    columns, metrics = run(function, FakeEngine(lambda payload: []))
    assert np.isnan(columns.rollout_log_probs).all() and columns.loss_mask.all()
    assert (columns.weight_versions == -1).all()
    for tokens, mask, _ in rows_of(columns):
        assert tokenizer.decode(tokens[-len(mask) :]).startswith("It is")
    assert metrics["rollout/num_text_only_samples"] == 4


def test_a_conversation_ends_where_the_context_does(run, tokenizer):
    function = GROUP.replace("if call is None:", "if not response:")
    function = function.replace('str(call["a"] + call["b"])', '"x " * 20')
    engine = FakeEngine(calls_then_answers(tokenizer))
    columns, metrics = run(function, engine, "--rollout-max-context-len", "90")
    assert metrics["rollout/truncated_ratio"] == 1.0 and columns.lengths.max() <= 90
    assert (columns.loss_mask[columns.response_offsets[:-1]] == 1).all()


def test_the_number_of_turns_is_logged(run, tokenizer):
    engine = FakeEngine(calls_then_answers(tokenizer))
    _, without = run(GROUP, engine)
    assert not any(name.startswith("multi_turn/") for name in without)
    engine = FakeEngine(calls_then_answers(tokenizer))
    columns, metrics = run(GROUP, engine, "--log-multi-turn")
    assert metrics["multi_turn/turns/mean"] == len(engine.requests) / 4
    assert (metrics["multi_turn/turns/min"], metrics["multi_turn/turns/max"]) == (1, 2)
    assert metrics["multi_turn/inserted_tokens/mean"] == (columns.loss_mask == 0).sum() / 4
    assert metrics["multi_turn/branches"] == 0


SLIME = """
import asyncio

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


def keep(args, samples: list[Sample], **kwargs):
    return DynamicFilterOutput(keep=max(s.get_reward_value(args) for s in samples) > -1, reason="none")


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = state.tokenizer.apply_chat_template(sample.prompt, tokenize=False, add_generation_prompt=True)
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response_ids, loss_mask = [], []
    for turn in range(2):
        payload = {"input_ids": prompt_ids + response_ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response_ids += ids
        loss_mask += [1] * len(ids)
        if turn == 0:
            note = state.tokenizer("Sure?", add_special_tokens=False)["input_ids"]
            response_ids += note
            loss_mask += [0] * len(note)
    sample.tokens, sample.response_length = prompt_ids + response_ids, len(response_ids)
    sample.response, sample.loss_mask = state.tokenizer.decode(response_ids), loss_mask
    sample.status = Sample.Status.COMPLETED
    return sample
"""


def test_a_file_written_for_slime_runs_as_it_is_where_the_option_is_given(run, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with pytest.raises(HookError, match="No module named 'slime'"):
        run(SLIME, FakeEngine(calls_then_answers(tokenizer)))
    engine = FakeEngine(calls_then_answers(tokenizer))
    columns, metrics = run(SLIME, engine, "--slime-imports", "--rm-type", "random", "--log-multi-turn")
    assert metrics["multi_turn/turns/mean"] == 2 and len(engine.requests) == 8
    assert (columns.raw_rewards >= 0).all()
    import slime.rollout

    from colloid import Sample
    from colloid.rollout.generate import generate_rollout

    assert slime.utils.types.Sample is Sample
    assert slime.rollout.sglang_rollout.generate_rollout is generate_rollout
    with pytest.raises(ImportError, match="--slime-imports has no slime.utils.types.Sampler; .* it has Sample, Sample"):
        from slime.utils.types import Sampler  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="slime.ray"):
        import slime.ray  # noqa: F401
    for name in [name for name in sys.modules if name.split(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)


def test_every_name_that_files_written_for_slime_import_is_there(monkeypatch):
    from colloid import slime_imports

    for names in slime_imports.MODULES.values():
        for target in names.values():
            module, _, name = target.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_the_page_of_the_documentation_shows_a_function_that_runs(run, tokenizer):
    page = (Path(__file__).resolve().parents[2] / "docs/multi_turn.md").read_text()
    function = page.split("```python\n")[1].split("```")[0]
    columns, _ = run(function, FakeEngine(calls_then_answers(tokenizer)))
    assert (columns.raw_rewards == 1.0).all() and (columns.loss_mask == 0).any()


def test_what_was_recorded_is_not_lost_where_a_copy_comes_back(run, tokenizer):
    function = "import copy\n" + GROUP.replace("return samples", "return copy.deepcopy(samples)")
    columns, _ = run(function, FakeEngine(calls_then_answers(tokenizer)))
    assert (columns.response_lengths > 0).all() and (columns.rollout_log_probs <= 0).all()
    function = ONE.replace("return sample", "import copy; return [copy.copy(sample), copy.copy(sample)]")
    with pytest.raises(HookError, match="recorded 3 turns of sample 0, which is not among the 2 samples"):
        run(function, FakeEngine(calls_then_answers(tokenizer)), "--rm-type", "random")


def test_generate_single_outside_of_a_rollout_is_an_error():
    from colloid.rollout import generate_single

    with pytest.raises(HookError, match="only inside the function of --custom-generate-function-path"):
        asyncio.run(generate_single([{"role": "user", "content": "x"}]))
