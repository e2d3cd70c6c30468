"""The rollout manager against a fake engine: from a JSONL file to scheduled batches, and what can go wrong between."""

from __future__ import annotations

import asyncio
import json
import random

import numpy as np
import pyarrow.parquet
import pytest
from aiohttp import web

from colloid.config import parse
from colloid.errors import ConfigError, DataError, EngineError, HookError
from colloid.rollout.manager import RolloutManager
from tests.fake_engine import FakeEngine, seeded

PROMPTS = 10


@pytest.fixture
def run_args(tiny_model_dir, tmp_path):
    """`run_args(*flags, rows=…)` -> the options of a small run."""

    def make(*flags, rows=None):
        rows = rows or [{"prompt": f"What is {i} + 1?", "label": str(i + 1)} for i in range(PROMPTS)]
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        base = {
            "--hf-checkpoint": str(tiny_model_dir()),
            "--prompt-data": str(data),
            "--rollout-batch-size": "4",
            "--n-samples-per-prompt": "2",
            "--rollout-max-response-len": "6",
            "--num-rollout": "3",
            "--outputs-dir": str(tmp_path / "outputs"),
        }
        given = [word for pair in base.items() if pair[0] not in flags for word in pair]
        return parse([*given, *flags], "train")

    return make


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir())


def replies(tokenizer, choose):
    """A reply of text: `choose(number drawn from prompt and seed, prompt)` and the end token."""

    def reply(payload):
        text = choose(seeded(payload, 1000), tokenizer.decode(payload["input_ids"]))
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    return reply


def right_or_wrong(number, prompt):
    """The right answer to `What is i + 1?`, or a wrong one, by the number."""
    left = int(prompt.split("What is ")[1].split(" +")[0])
    return str(left + 1 if number % 2 else left + 500)


def with_manager(args, engine, body):
    async def run():
        async with engine.serve():
            manager = RolloutManager(args)
            await manager.start(engine.url, [engine.url], "key")
            try:
                return await body(manager)
            finally:
                await manager.close()

    return asyncio.run(run())


def samples_of(result):
    """By sample id: (tokens, raw reward)."""
    found = {}
    for batch in result.batches:
        columns = batch.samples
        for row, sample_id in enumerate(columns.sample_ids.tolist()):
            tokens = columns.tokens[columns.offsets[row] : columns.offsets[row + 1]].tolist()
            found[sample_id] = tokens, columns.raw_rewards[row]
    return found


def test_a_rollout_is_columns_of_exactly_what_was_sampled(run_args, tokenizer):
    engine = FakeEngine(replies(tokenizer, right_or_wrong))
    result = with_manager(run_args(), engine, lambda manager: manager.generate(0, 3))
    (batch,) = result.batches
    columns = batch.samples
    assert columns.num_samples == 8 and sorted(columns.sample_ids.tolist()) == list(range(8))
    assert set(columns.raw_rewards.tolist()) == {0.0, 1.0}
    assert (columns.weight_versions == 3).all() and columns.loss_mask.all()
    assert set(columns.steps.tolist()) == {0}
    for row in range(8):
        tokens = columns.tokens[columns.offsets[row] : columns.offsets[row + 1]]
        length = columns.response_lengths[row]
        text = tokenizer.decode(tokens[-length:])
        assert (text == f"{columns.sample_ids[row] // 2 + 1}<|im_end|>") == (columns.raw_rewards[row] == 1.0)
        span = slice(columns.response_offsets[row], columns.response_offsets[row + 1])
        expected = [-0.25 - (token % 7) / 8 for token in tokens[-length:]]
        np.testing.assert_allclose(columns.rollout_log_probs[span], expected)
    assert result.metrics["rollout/raw_reward"] == columns.raw_rewards.mean()
    assert result.metrics["rollout/off_policy_token_ratio"] == 0.0
    assert result.metrics["rollout/num_submitted_groups"] == 4.0
    assert result.examples[0]["label"] == "1"


def test_requests_carry_the_sampling_options_and_a_seed_of_their_own(run_args, tokenizer):
    args = run_args("--rollout-temperature", "0.7", "--rollout-top-k", "5", "--rollout-stop", "\n\n")
    engine = FakeEngine(replies(tokenizer, right_or_wrong))
    with_manager(args, engine, lambda manager: manager.generate(0, 3))
    params = [request["sampling_params"] for request in engine.requests]
    assert {(p["temperature"], p["top_k"], tuple(p["stop"]), p["max_new_tokens"]) for p in params} == {
        (0.7, 5, ("\n\n",), 6)
    }
    assert len({p["sampling_seed"] for p in params}) == 8
    assert all(request["return_logprob"] for request in engine.requests)
    assert engine.headers[0]["Authorization"] == "Bearer key"


def test_groups_without_a_gradient_are_in_no_micro_batch_but_in_the_totals(run_args, tokenizer):
    engine = FakeEngine(replies(tokenizer, lambda number, prompt: right_or_wrong(1, prompt)))
    args = run_args()
    result = with_manager(args, engine, lambda manager: manager.generate(0, 3))
    assert result.batches[0].micro_batches == [[]]
    assert result.batches[0].totals[0].num_rollouts == 8
    assert result.metrics["rollout/zero_std_groups"] == 1.0
    with_kl = run_args("--use-kl-loss", "--kl-loss-coef", "0.1")
    result = with_manager(with_kl, engine, lambda manager: manager.generate(0, 3))
    assert sum(len(rows) for rows in result.batches[0].micro_batches[0]) == 8


def test_equal_rewards_raise_an_alarm_with_a_samples_text(run_args, tokenizer, caplog):
    engine = FakeEngine(replies(tokenizer, lambda number, prompt: "no idea"))
    with_manager(run_args(), engine, lambda manager: manager.generate(0, 3))
    assert "rewards of all 8 samples are 0" in caplog.text and "response: 'no ide'" in caplog.text


def test_a_response_at_the_limit_is_truncated(run_args, tokenizer):
    engine = FakeEngine(lambda payload: [40 + seeded(payload, 3)] * 50)
    result = with_manager(run_args(), engine, lambda manager: manager.generate(0, 3))
    assert result.metrics["rollout/truncated_ratio"] == 1.0
    assert result.metrics["rollout/response_length"] == result.metrics["rollout/response_length/max"] == 6.0


def test_a_responses_text_is_without_the_token_that_ended_it(run_args, tokenizer):
    args = run_args()
    engine = FakeEngine(replies(tokenizer, right_or_wrong))
    with_manager(args, engine, lambda manager: manager.generate(0, 3))
    table = pyarrow.parquet.read_table(f"{args.run_dir}/rollouts/000000.parquet").to_pylist()
    assert len(table) == 8
    for row in table:
        assert (row["response"] == row["label"]) == (row["reward"] == 1.0)
        assert row["status"] == "completed" and row["newest_weight_version"] == 3


FILTER = "colloid.rollout.filters.check_reward_nonzero_std"


def mixed_delay(seed):
    generator = random.Random(seed)
    return lambda payload: generator.random() * 0.03


@pytest.mark.parametrize("seed", range(4))
def test_deterministic_the_outcome_does_not_depend_on_what_finishes_first(run_args, tokenizer, seed):
    flags = ("--deterministic", "--dynamic-sampling-filter-path", FILTER, "--over-sampling-batch-size", "6")

    async def body(manager):
        results = [await manager.generate(rollout_id, 3) for rollout_id in range(3)]
        return [samples_of(result) for result in results], results

    def run(delay):
        return with_manager(run_args(*flags), FakeEngine(replies(tokenizer, right_or_wrong), delay), body)

    expected, _ = run(lambda payload: 0.0)
    found, results = run(mixed_delay(seed))
    assert found == expected
    assert [len(samples) for samples in found] == [8, 8, 8]
    assert sum(result.metrics["rollout/num_filtered_groups"] for result in results) > 0
    assert sum(result.metrics["rollout/num_carried_groups"] for result in results) > 0
    assert all(result.metrics["rollout/num_aborted_groups"] == 0 for result in results)


def test_every_drawn_group_is_trained_filtered_or_waiting(run_args, tokenizer):
    """Not deterministic: surplus is aborted; its groups start anew in the next rollout."""
    flags = ("--dynamic-sampling-filter-path", FILTER, "--over-sampling-batch-size", "7")
    engine = FakeEngine(replies(tokenizer, right_or_wrong), mixed_delay(1))

    async def body(manager):
        trained, filtered = [], 0
        for rollout_id in range(4):
            result = await manager.generate(rollout_id, 3)
            groups = set(result.batches[0].samples.group_ids.tolist())
            assert len(groups) == 4
            trained += groups
            filtered += result.metrics["rollout/num_filtered_groups"]
        source = manager._source
        waiting = [group[0].group_index for group in source.buffer]
        assert len(set(trained)) == len(trained) and not set(trained) & set(waiting)
        assert len(trained) + len(waiting) + filtered == source.group_index
        for group in source.buffer:
            done = all(sample.reward is not None for sample in group)
            assert done or all(sample.response_length == 0 for sample in group)

    with_manager(run_args(*flags), engine, body)
    assert not engine.running


def test_the_filters_fallback_fills_the_batch_and_says_so(run_args, tokenizer, caplog):
    engine = FakeEngine(replies(tokenizer, lambda number, prompt: "no idea"))
    args = run_args("--dynamic-sampling-filter-path", FILTER)
    result = with_manager(args, engine, lambda manager: manager.generate(0, 3))
    assert result.metrics["rollout/num_filled_groups"] == 4.0
    assert result.metrics["rollout/num_submitted_groups"] == 40.0
    assert result.metrics["rollout/dynamic_filter/drop_zero_std_0"] == 40.0
    assert "dropped groups fill the batch" in caplog.text


def test_a_filter_that_keeps_nothing_ends_with_its_name(run_args, tokenizer, tmp_path):
    (tmp_path / "strict.py").write_text("def dynamic_filter(args, samples, **kwargs):\n    return False\n")
    args = run_args("--dynamic-sampling-filter-path", str(tmp_path / "strict.py"))
    engine = FakeEngine(replies(tokenizer, right_or_wrong))
    with pytest.raises(HookError, match="of 40 groups the dynamic filter dropped 40.*dynamic-sampling-filter-path"):
        with_manager(args, engine, lambda manager: manager.generate(0, 3))


@pytest.mark.parametrize("flags", [(), ("--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path", FILTER)])
def test_a_resumed_manager_goes_on_as_the_straight_run(run_args, tokenizer, tmp_path, flags):
    flags = ("--deterministic", "--rollout-shuffle", *flags)
    engine = FakeEngine(replies(tokenizer, right_or_wrong))

    async def straight(manager):
        return [samples_of(await manager.generate(rollout_id, 3)) for rollout_id in range(4)]

    async def first_half(manager):
        found = [samples_of(await manager.generate(rollout_id, 3)) for rollout_id in range(2)]
        manager.save(tmp_path, 1)
        return found

    async def second_half(manager):
        manager.load(tmp_path, 1)
        return [samples_of(await manager.generate(rollout_id, 3)) for rollout_id in (2, 3)]

    expected = with_manager(run_args(*flags), engine, straight)
    found = with_manager(run_args(*flags), engine, first_half) + with_manager(run_args(*flags), engine, second_half)
    assert found == expected


def test_a_checkpoint_before_training_hands_the_rollout_out_again(run_args, tokenizer, tmp_path):
    """As in asynchronous training: rollout 1 is generated when the checkpoint of rollout 0 is made."""
    engine = FakeEngine(replies(tokenizer, right_or_wrong))

    async def first(manager):
        await manager.generate(0, 3)
        ahead = samples_of(await manager.generate(1, 3))
        manager.save(tmp_path, 0)
        return ahead

    async def second(manager):
        manager.load(tmp_path, 0)
        return samples_of(await manager.generate(1, 3))

    args = run_args("--deterministic")
    assert with_manager(args, engine, first) == with_manager(args, engine, second)


def test_evaluation_leaves_training_data_alone_and_repeats_exactly(run_args, tokenizer, tmp_path):
    data = tmp_path / "heldout.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"What is {i} + 1?", "label": str(i + 1)}) + "\n" for i in range(5)))
    flags = ("--eval-prompt-data", "held out", str(data), "--n-samples-per-eval-prompt", "4", "--eval-temperature", "0")
    engine = FakeEngine(replies(tokenizer, right_or_wrong))
    args = run_args(*flags)

    async def body(manager):
        before = manager._source.state_dict()
        first, second = await manager.evaluate(0), await manager.evaluate(2)
        assert manager._source.state_dict() == before
        return first, second

    first, second = with_manager(args, engine, body)
    assert first["eval/held out"] == second["eval/held out"] and 0 < first["eval/held out"] < 1
    assert first["eval/held out/truncated_ratio"] == 0.0
    assert {request["sampling_params"]["temperature"] for request in engine.requests} == {0}
    assert len({request["sampling_params"]["sampling_seed"] for request in engine.requests}) == 20
    table = pyarrow.parquet.read_table(f"{args.run_dir}/rollouts/eval_held_out_000002.parquet")
    assert table.num_rows == 20


GENERATE = """
from colloid import Sample
from colloid.rollout import get_model_url, post

async def generate(args, sample, sampling_params):
    if sample.index == args.rollout_batch_size:
        raise RuntimeError("tool is broken")
    parts = []
    for turn in range(2):
        answer = await post(get_model_url(args), {
            "input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True})
        entries = answer["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens([e[1] for e in entries], log_probs=[e[0] for e in entries], weight_version=3)
        sample.append_response_tokens([11, 12], trained=False)
    sample.response = "4"
    sample.reward = float(sample.index % 2)
    if sample.index == 1:
        second = Sample.from_dict({**sample.to_dict(), "index": sample.index, "metadata": {}})
        return [sample, second]
    return sample
"""


def test_a_custom_generate_function_makes_turns_parts_and_failures(run_args, tokenizer, tmp_path, caplog):
    (tmp_path / "my_generate.py").write_text(GENERATE)
    engine = FakeEngine(lambda payload: [40 + seeded(payload, 3), 50])
    args = run_args("--custom-generate-function-path", str(tmp_path / "my_generate.py"))
    result = with_manager(args, engine, lambda manager: manager.generate(0, 3))
    columns = result.batches[0].samples
    assert sorted(columns.sample_ids.tolist()) == [0, 1, 1, 2, 3, 4, 5, 6, 7]
    siblings = columns.sample_ids == 1
    assert set(columns.rollout_ids[siblings].tolist()) == {1}
    assert set(columns.rollout_tokens[siblings].tolist()) == {8}
    assert columns.loss_mask[: columns.response_lengths[0]].tolist() in ([1, 1, 0, 0, 1, 1, 0, 0], [])
    failed = columns.sample_ids == 4
    assert np.isnan(columns.raw_rewards[failed]).all() and (columns.loss_weights[failed] == 0).all()
    assert result.metrics["rollout/num_failed_samples"] == 1.0
    assert "my_generate.py" in caplog.text and "tool is broken" in caplog.text
    seeds = [request["sampling_params"]["sampling_seed"] for request in engine.requests]
    assert len(set(seeds)) == len(seeds) == 14


def test_an_option_that_only_the_reward_reads_counts_as_read(run_args, tokenizer, tmp_path):
    (tmp_path / "reward.py").write_text("def reward_func(args, sample):\n    return args.max_turns * sample.index\n")
    args = run_args("--custom-rm-path", str(tmp_path / "reward.py"), "--max-turns", "3")
    assert "max_turns" in args.unread()
    engine = FakeEngine(replies(tokenizer, right_or_wrong))
    result = with_manager(args, engine, lambda manager: manager.generate(0, 3))
    assert "max_turns" not in args.unread()
    assert sorted(reward for _, reward in samples_of(result).values()) == [0, 3, 6, 9, 12, 15, 18, 21]


def test_a_reward_that_always_raises_ends_the_run_with_its_name(run_args, tokenizer, tmp_path):
    (tmp_path / "bad_reward.py").write_text("async def reward_func(args, sample):\n    return 1 / 0\n")
    args = run_args("--custom-rm-path", str(tmp_path / "bad_reward.py"))
    engine = FakeEngine(replies(tokenizer, right_or_wrong))
    with pytest.raises(HookError, match="all 8 samples of rollout 0 FAILED.*bad_reward.py:2: ZeroDivisionError"):
        with_manager(args, engine, lambda manager: manager.generate(0, 3))


def test_what_the_engine_refuses_is_said_in_its_words(run_args, tokenizer):
    engine = FakeEngine(lambda payload: web.Response(status=400, text="the prompt has too many tokens"))
    with pytest.raises(EngineError, match="all 8 samples.*the prompt has too many tokens"):
        with_manager(run_args(), engine, lambda manager: manager.generate(0, 3))


def test_an_answer_without_log_probs_is_an_engine_error(run_args, tokenizer):
    engine = FakeEngine(lambda payload: web.json_response({"text": "x", "meta_info": {}}))
    with pytest.raises(EngineError, match="no output_token_logprobs"):
        with_manager(run_args(), engine, lambda manager: manager.generate(0, 3))


def test_data_without_labels_and_no_reward_is_refused_before_anything_starts(run_args):
    rows = [{"prompt": "a", "answer": "1"}]
    with pytest.raises(ConfigError, match="--label-key.*--custom-rm-path or --rm-type"):
        RolloutManager(run_args(rows=rows))


def test_one_row_without_a_label_is_named(run_args):
    rows = [{"prompt": "a", "label": "1"}, {"prompt": "b"}]
    with pytest.raises(DataError, match="data.jsonl:2: no label under 'label'"):
        RolloutManager(run_args(rows=rows))
    RolloutManager(run_args("--rm-type", "random", rows=rows))


def test_rollouts_are_made_in_order_whichever_call_comes_first(tokenizer, run_args):
    async def both(manager):
        second = asyncio.ensure_future(manager.generate(1, 3, trained=-1, after=0))
        await asyncio.sleep(0.05)
        first = await manager.generate(0, 3, trained=-1)
        return first, await second

    engine = FakeEngine(replies(tokenizer, lambda number, prompt: str(number)))
    first, second = with_manager(run_args(), engine, both)
    assert max(first.batches[0].samples.sample_ids) < min(second.batches[0].samples.sample_ids)
