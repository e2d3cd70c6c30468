"""A teacher behind an engine, with a fake server of SGLang's API: what it is asked, what it answers, how it fails."""

from __future__ import annotations

import asyncio
import json
import math
import shutil

import numpy as np
import pytest
from aiohttp import web

from colloid.data.columns import to_columns
from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError, DataError, EngineError
from colloid.rollout.batching import rollout_batch
from colloid.rollout.manager import RolloutManager
from colloid.rollout.record import load_rollout, save_rollout
from colloid.rollout.teacher import Teacher, check_same_tokenizer, server_client
from tests.fake_engine import FakeEngine
from tests.unit.test_rollout import replies, right_or_wrong, run_args  # noqa: F401


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir())


def log_prob_of(token):
    return -0.5 - token % 5


class Judge:
    """Answers as SGLang does; with `scales` also as the embedded engine, which knows the temperature."""

    def __init__(self, tokenizer, *, scales=False, vocab=512, change=lambda entries, payload: entries):
        self.tokenizer, self.scales, self.vocab, self.change = tokenizer, scales, vocab, change

    def __call__(self, payload):
        assert payload["return_logprob"] and payload["sampling_params"]["max_new_tokens"] == 0
        ids = payload.get("input_ids") or self.tokenizer(payload["text"])["input_ids"]
        if max(ids) >= self.vocab:
            return web.Response(status=400, text=f"input_ids contains {max(ids)}")
        start = payload["logprob_start_len"]
        entries = [[None if i == start else log_prob_of(ids[i]), ids[i], None] for i in range(start, len(ids))]
        changed = self.change(entries, payload)
        if isinstance(changed, web.Response):
            return changed
        meta = {"input_token_logprobs": changed, "finish_reason": {"type": "length", "length": 0}}
        if self.scales and "input_logprob_temperature" in payload:
            meta["input_logprob_temperature"] = payload["input_logprob_temperature"]
        return web.json_response({"text": "", "output_ids": [], "meta_info": meta})


def with_teacher(reply, body, *, temperature=1.0, path="/generate"):
    async def run():
        engine = FakeEngine(reply)
        async with engine.serve():
            client = server_client(engine.url + path, api_key="its key", retry_delay=0.01)
            teacher = Teacher(client, temperature=temperature)
            try:
                return await body(teacher), engine
            finally:
                await teacher.close()

    return asyncio.run(run())


def make_sample(index, prompt, response, **options):
    sample = Sample(index=index, group_index=0, tokens=list(prompt), status=Status.COMPLETED, reward=0.0, **options)
    sample.append_response_tokens(list(response), log_probs=[-1.0] * len(response))
    return sample


def judge(samples, reply, **options):
    """The samples that were marked as failed, as (index, culprit, error)."""
    failed = []

    def mark_failed(sample, culprit, error):
        failed.append((sample.index, culprit, str(error)))
        sample.status = Status.FAILED

    _, engine = with_teacher(reply, lambda teacher: teacher.judge(samples, mark_failed), **options)
    return failed, engine


def test_it_is_asked_for_the_responses_log_probs_alone(tokenizer):
    samples = [make_sample(0, [1, 2, 3], [7, 8]), make_sample(1, [4], [9, 10, 11]), make_sample(2, [5], [])]
    samples += [make_sample(3, [1], [2]), make_sample(4, [1], [2])]
    samples[3].status, samples[4].teacher_log_probs = Status.FAILED, [-9.0]
    failed, engine = judge(samples, Judge(tokenizer))
    assert not failed
    assert [sample.teacher_log_probs for sample in samples[:2]] == [[-2.5, -3.5], [-4.5, -0.5, -1.5]]
    assert samples[2].teacher_log_probs == [] and samples[3].teacher_log_probs is None
    assert samples[4].teacher_log_probs == [-9.0]
    assert sorted(request["logprob_start_len"] for request in engine.requests) == [0, 2]
    assert engine.headers[0]["Authorization"] == "Bearer its key"
    assert not any("input_logprob_temperature" in request for request in engine.requests)


def test_a_failing_request_is_sent_again_and_then_its_sample_has_failed(tokenizer):
    tries = {7: 0, 8: 0}

    def flaky(entries, payload):
        token = payload["input_ids"][-1]
        tries[token] = tries.get(token, 0) + 1
        if token == 7 and tries[token] < 3 or token == 8:
            return web.Response(status=503, text="overloaded")
        return entries

    samples = [make_sample(3, [1], [7]), make_sample(4, [1], [8])]
    failed, engine = judge(samples, Judge(tokenizer, change=flaky))
    assert tries == {7: 3, 8: 3} and samples[0].teacher_log_probs == [-2.5]
    ((index, culprit, error),) = failed
    assert index == 4 and culprit == f"teacher {engine.url}" and "sample 4" in error and "overloaded" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries, payload: entries[:-1], "has 1 input_token_logprobs, which are not those of the 2"),
        (lambda entries, payload: [[-1.0, 3, None]] * 3, "not those of the 2 response tokens"),
        (lambda entries, payload: [*entries[:-1], [None, entries[-1][1], None]], "sample 0 are not finite"),
        (lambda entries, payload: web.Response(status=400, text="too long"), "status 400: too long"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_fails_the_sample(tokenizer, change, message):
    failed, _ = judge([make_sample(0, [1], [7, 8])], Judge(tokenizer, change=change))
    assert len(failed) == 1 and message in failed[0][2]


def test_the_check_knows_the_tokenizer_the_vocabulary_and_the_temperature(tokenizer):
    def check(reply, temperature=1.0, path="/generate"):
        return with_teacher(reply, lambda teacher: teacher.check(tokenizer), temperature=temperature, path=path)

    check(Judge(tokenizer), path="")
    check(Judge(tokenizer, scales=True), temperature=0.7)
    with pytest.raises(
        ConfigError, match="log-probs at temperature 1, as SGLang does, and --rollout-temperature is 0.7"
    ):
        check(Judge(tokenizer), temperature=0.7)
    with pytest.raises(ConfigError, match="does not take the policy's token ids.*input_ids contains"):
        check(Judge(tokenizer, vocab=300))
    with pytest.raises(ConfigError, match="gives no input_token_logprobs"):
        check(Judge(tokenizer, change=lambda entries, payload: []))

    def other(entries, payload):
        return [[-1.0, 5, None]] * 9 if "text" in payload else entries

    with pytest.raises(ConfigError, match="another tokenizer than --hf-checkpoint: it splits .* into 9 tokens"):
        check(Judge(tokenizer, change=other))

    def ids_alone(entries, payload):
        return web.Response(status=400, text="give input_ids") if "text" in payload else entries

    check(Judge(tokenizer, change=ids_alone))

    async def nobody():
        teacher = Teacher(server_client("http://127.0.0.1:9", retry_delay=0.01), temperature=1.0)
        try:
            await teacher.check(tokenizer)
        finally:
            await teacher.close()

    with pytest.raises(EngineError, match="the teacher at http://127.0.0.1:9 does not answer"):
        asyncio.run(nobody())


def test_a_directory_with_another_vocabulary_is_refused(tokenizer, tiny_model_dir, tmp_path):
    check_same_tokenizer(str(tiny_model_dir(seed=1)), tokenizer)
    check_same_tokenizer(str(tmp_path), tokenizer)  # no tokenizer there: the server is asked
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir(), other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"(\d+) tokens, and \1; 2 of the latter are others or have another id"):
        check_same_tokenizer(str(other), tokenizer)


def test_a_rollout_of_the_manager_has_the_teachers_log_probs(run_args, tokenizer, tmp_path):  # noqa: F811
    """Without labels and without a reward; and the saved samples train again without the teacher."""
    sampled, judging = replies(tokenizer, right_or_wrong), Judge(tokenizer)

    def reply(payload):
        return judging(payload) if "logprob_start_len" in payload else sampled(payload)

    engine = FakeEngine(reply)
    args = run_args(
        *("--use-opd", "--opd-type", "sglang", "--rm-url", "http://127.0.0.1:1/generate"),
        *("--save-debug-rollout-data", str(tmp_path / "saved_{rollout_id}.jsonl")),
        rows=[{"prompt": f"What is {i} + 1?"} for i in range(10)],
    )

    async def run():
        async with engine.serve():
            args.rm_url = f"{engine.url}/generate"
            manager = RolloutManager(args)
            await manager.start(engine.url, [engine.url], "key")
            try:
                return await manager.generate(0, 3)
            finally:
                await manager.close()

    result = asyncio.run(run())
    columns = result.batches[0].samples
    assert columns.num_samples == 8 and (columns.raw_rewards == 0).all()
    responses = [
        columns.tokens[end - length : end]
        for end, length in zip(columns.offsets[1:], columns.response_lengths, strict=True)
    ]
    np.testing.assert_allclose(columns.teacher_log_probs, log_prob_of(np.concatenate(responses)))
    assert sum(len(rows) for rows in result.batches[0].micro_batches[0]) == 8
    assert result.metrics["perf/teacher_time"] > 0
    authorised = {headers.get("Authorization") for headers in engine.headers}
    assert authorised == {"Bearer key", None}, "the run's key is not for another's server"
    samples = load_rollout(args.save_debug_rollout_data.format(rollout_id=0))
    in_order = columns.select(np.argsort(columns.sample_ids))
    np.testing.assert_array_equal(rollout_batch(args, samples).teacher_log_probs, in_order.teacher_log_probs)
    for sample in samples[:2]:
        sample.teacher_log_probs = None
    with pytest.raises(DataError, match=r"2 of 8 samples have no teacher_log_probs: \[0, 1\]"):
        rollout_batch(args, samples)


def test_the_column_is_selected_with_its_samples():
    samples = [make_sample(0, [1], [7, 8]), make_sample(1, [1], [9]), make_sample(2, [1], [5, 6])]
    zeros = np.zeros(3)
    assert to_columns(samples, raw_rewards=zeros, rewards=zeros).select(np.array([1])).teacher_log_probs is None
    samples[0].teacher_log_probs, samples[2].teacher_log_probs = [-1.0, -2.0], [-3.0, -4.0]
    samples[1].status = Status.FAILED
    batch = to_columns(samples, raw_rewards=zeros, rewards=zeros).select(np.array([2, 1, 0]))
    values = batch.teacher_log_probs.tolist()
    assert values[:2] == [-3.0, -4.0] and math.isnan(values[2]) and values[3:] == [-1.0, -2.0]
    samples[0].teacher_log_probs = [-1.0]
    with pytest.raises(DataError, match="teacher_log_probs has 1 entries for a response of 2 tokens"):
        to_columns(samples, raw_rewards=zeros, rewards=zeros)


def test_saved_samples_keep_them(tmp_path):
    sample = make_sample(0, [1], [7, 8])
    sample.teacher_log_probs = [-0.1, -1 / 3]
    save_rollout(tmp_path / "saved", [sample])
    assert load_rollout(tmp_path / "saved")[0].teacher_log_probs == sample.teacher_log_probs
    sample.reset_response()
    assert sample.teacher_log_probs is None


def test_a_rows_reward_cannot_be_asked_of_the_teachers_server(run_args):  # noqa: F811
    row = {"prompt": "1 + 1?", "label": "2", "metadata": {"rm_type": "remote_rm"}}
    args = run_args(*("--use-opd", "--opd-type", "sglang", "--rm-url", "http://127.0.0.1:1"), rows=[row] * 8)
    with pytest.raises(ConfigError, match="'remote_rm' asks the server at --rm-url.*the teacher's: .*opd-teacher-load"):
        RolloutManager(args)
