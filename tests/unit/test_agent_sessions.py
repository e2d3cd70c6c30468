"""Sessions inside rollouts, against a fake engine: agents in threads and in processes, aborts, seeds, limits."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from colloid.errors import ConfigError, HookError
from tests.conversations import run_conversations
from tests.fake_engine import FakeEngine, seeded

AGENT = '''
"""An agent as its author wrote it: a loop of its own, by the blocking client."""

import openai


def ask_twice(question, base_url, api_key, temperature=1.0):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    for again in ("Sure?", None):
        answer = client.chat.completions.create(model="gpt", messages=messages, temperature=temperature)
        messages.append(answer.choices[0].message)
        if again is not None:
            messages.append({"role": "user", "content": again})
    return len(messages)
'''
TROUBLE = """
def hang(path):
    import os
    import time

    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def explode():
    raise ValueError("boom")
"""
GENERATE = """
import asyncio

import agent_under_test as agent
from colloid.agents import session


async def generate(args, sample, sampling_params):
    async with session(args, sample, sampling_params) as episode:
        question = sample.prompt[0]["content"]
        length = await RUN(agent.ask_twice, question, episode.base_url, episode.api_key)
    return episode.samples(reward=float(length))
"""
THREAD = GENERATE.replace("RUN", "asyncio.to_thread")
PROCESS = GENERATE.replace("RUN", "episode.run")


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir())


@pytest.fixture
def run(tiny_model_dir, tmp_path):
    """`run(function, engine, *flags)` -> the columns of a rollout of 2 prompts with 2 samples, and its metrics."""

    def make(function, engine, *flags, body=None):
        (tmp_path / "agent_under_test.py").write_text(AGENT)
        (tmp_path / "agent_in_trouble.py").write_text(TROUBLE)
        return run_conversations(tiny_model_dir(), tmp_path, function, engine, *flags, body=body)

    return make


@pytest.fixture(autouse=True)
def fresh_agent(monkeypatch, tmp_path):
    """Each test has its own directory with the agent's file in it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("agent_under_test", "agent_in_trouble"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def says_numbers(tokenizer):
    def reply(payload):
        return [*tokenizer(str(seeded(payload, 900)))["input_ids"], tokenizer.eos_token_id]

    return reply


def check_columns(columns, tokenizer, turns=2):
    for row in range(columns.num_samples):
        part = slice(columns.response_offsets[row], columns.response_offsets[row + 1])
        tokens = columns.tokens[columns.offsets[row] : columns.offsets[row + 1]]
        mask, response = columns.loss_mask[part], tokens[len(tokens) - columns.response_lengths[row] :]
        expected = np.where(mask == 1, -0.25 - (response % 7) / 8, 0.0)
        np.testing.assert_allclose(columns.rollout_log_probs[part], expected)
        assert tokenizer.decode(response[mask == 1]).count("<|im_end|>") == turns
        assert tokenizer.decode(response).count("Sure?") == 1


@pytest.mark.parametrize("function", [THREAD, PROCESS], ids=["thread", "process"])
def test_a_blocking_client_in_a_thread_or_a_process_is_trained_by_what_it_sampled(run, tokenizer, function, caplog):
    engine = FakeEngine(says_numbers(tokenizer))
    function = function.replace("episode.api_key)", "episode.api_key, temperature=0.2)")
    columns, metrics = run(function, engine, "--log-multi-turn")
    assert columns.num_samples == 4 and (columns.raw_rewards == 4.0).all() and metrics["multi_turn/turns/mean"] == 2
    check_columns(columns, tokenizer)
    params = [request["sampling_params"] for request in engine.requests]
    assert {one["temperature"] for one in params} == {1.0} and len({one["sampling_seed"] for one in params}) == 8
    assert caplog.text.count("asks for temperature 0.2: it is sampled with the run's, 1.0") == 1


def test_the_same_run_asks_the_same_whatever_comes_first(run, tokenizer):
    function = """
import asyncio

import openai
from colloid.agents import session


async def generate(args, sample, sampling_params):
    async with session(args, sample, sampling_params, client_sampling=True) as episode:
        client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)

        async def ask(text):
            messages = [{"role": "user", "content": text}]
            await client.chat.completions.create(model="m", messages=messages, temperature=0.5, seed=1, max_tokens=7)

        await asyncio.gather(*(ask(text) for text in ORDER))
    return episode.samples(reward=1.0)
"""
    asked = []
    for order in ("AAB", "BAA"):
        engine = FakeEngine(says_numbers(tokenizer))
        columns, _ = run(function.replace("ORDER", repr(order)), engine)
        assert columns.num_samples == 12 and sorted(set(columns.rollout_ids.tolist())) == [0, 1, 2, 3]
        assert {request["sampling_params"]["temperature"] for request in engine.requests} == {0.5}
        assert {request["sampling_params"]["max_new_tokens"] for request in engine.requests} == {7}
        asked.append({(*one["input_ids"], one["sampling_params"]["sampling_seed"]) for one in engine.requests})
    assert asked[0] == asked[1] and len(asked[0]) == 12


def test_agents_that_hang_or_raise_cost_their_samples_and_are_killed(run, tokenizer, tmp_path):
    function = f"""
import agent_in_trouble as agent
import agent_under_test
from colloid.agents import session


async def generate(args, sample, sampling_params):
    async with session(args, sample, sampling_params) as episode:
        try:
            if sample.index == 0:
                await episode.run(agent.hang, "{tmp_path}/pid", timeout=3)
            if sample.index == 1:
                await episode.run(agent.explode)
            if sample.index == 2:
                await episode.run(lambda: 1)
        except Exception as error:
            open(f"{tmp_path}/{{sample.index}}", "w").write(str(error))
            raise
        await episode.run(agent_under_test.ask_twice, "Well?", episode.base_url, episode.api_key)
    return episode.samples(reward=1.0)
"""
    columns, metrics = run(function, FakeEngine(says_numbers(tokenizer)))
    assert metrics["rollout/num_failed_samples"] == 3 and np.isnan(columns.raw_rewards).sum() == 3
    hung, raised, inside = ((tmp_path / str(index)).read_text() for index in range(3))
    assert hung.startswith("hang of") and "took longer than 3 s" in hung
    assert raised.startswith("explode of") and "ValueError: boom" in raised and "line" in raised
    assert "defined at the top of a file" in inside
    assert ended(int((tmp_path / "pid").read_text()))


def ended(pid):
    """Gone, or a zombie that nobody has waited for yet."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            if stat.read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_full_context_truncates(run, tokenizer):
    function = THREAD.replace("length = await", "import openai\n        length = 1.0\n        await").replace(
        "asyncio.to_thread(agent.ask_twice, question, episode.base_url, episode.api_key)",
        "asyncio.to_thread(until_full, openai, question, episode)",
    )
    function += """

def until_full(openai, question, episode):
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages = [{"role": "user", "content": question}]
    while True:
        try:
            answer = client.chat.completions.create(model="m", messages=messages)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded", error
            return
        messages += [answer.choices[0].message, {"role": "user", "content": "And now, what do you say to that?"}]
"""
    columns, metrics = run(function, FakeEngine(says_numbers(tokenizer)), "--rollout-max-context-len", "150")
    assert metrics["rollout/truncated_ratio"] == 1.0 and 100 < columns.lengths.max() <= 150


def test_the_page_of_the_documentation_shows_a_function_that_runs(run, tokenizer):
    page = (Path(__file__).resolve().parents[2] / "docs/agents.md").read_text()
    function = page.split("```python\n")[1].split("```")[0]
    columns, metrics = run(function, FakeEngine(says_numbers(tokenizer)), "--log-multi-turn")
    assert metrics["multi_turn/turns/mean"] == 2 and not np.isnan(columns.raw_rewards).any()


def test_samples_that_are_not_taken_are_an_error(run, tokenizer):
    function = THREAD.replace("return episode.samples(reward=float(length))", "return sample")
    with pytest.raises(HookError, match=r"session of sample \d has recorded 2 turns, and they were not taken"):
        run(function, FakeEngine(says_numbers(tokenizer)), "--rm-type", "random")


def test_a_session_needs_a_rollout_and_an_address_that_can_be_told(run):
    from colloid.agents import session

    with pytest.raises(HookError, match="only inside the function"):
        session(None, None)
    with pytest.raises(ConfigError, match="--agent-endpoint-host is '0.0.0.0', which is no address that agents"):
        run(THREAD, None, "--agent-endpoint-host", "0.0.0.0")


@pytest.mark.parametrize("function", [THREAD, PROCESS], ids=["thread", "process"])
def test_what_an_abort_stops_is_a_prompt_again(run, tokenizer, function):
    """The slow episodes of the first rollout are told to end, and have another try in the second."""
    slow = {2, 3}

    def delay(payload):
        text = tokenizer.decode(payload["input_ids"])
        left = int(text.split("What is ")[1].split(" +")[0])
        return 30.0 if left in slow and "Sure" in text else 0.3

    engine = FakeEngine(says_numbers(tokenizer), delay)

    async def twice(manager):
        first = await manager.generate(0, 3)
        slow.clear()
        return first, await manager.generate(1, 3)

    flags = ("--over-sampling-batch-size", "4")
    results = run(function, engine, *flags, body=twice)
    assert engine.aborts or function == PROCESS, "processes may be too slow to have asked"
    both = [result.batches[0].samples for result in results]
    assert len({index for columns in both for index in columns.sample_ids.tolist()}) == 8
    for columns in both:
        check_columns(columns, tokenizer)
        assert not any(math.isnan(reward) for reward in columns.raw_rewards)
