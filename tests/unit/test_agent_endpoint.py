"""The endpoint of agents, asked by the real clients: what they get is what is recorded, and errors have their shape."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import anthropic
import openai
import pytest

from colloid.agents.chat import ContextFull, Sampled
from colloid.agents.endpoint import AgentEndpoint
from colloid.agents.processes import AgentProcesses
from colloid.agents.sessions import Session
from colloid.data.sample import Sample, Status
from colloid.data.turns import TurnRenderer
from colloid.errors import EngineError, HookError
from tests.templates import make_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ADD_OF_ANTHROPIC = {
    "name": "add",
    "description": "Adds.",
    "input_schema": ADD["function"]["parameters"],
}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2.5")


class Policy:
    """Samples texts in turn; each token's log-prob and version follow from it."""

    def __init__(self, tokenizer, *texts, limit=4096, wait=None):
        self.tokenizer, self.texts, self.limit, self.wait = tokenizer, list(texts), limit, wait
        self.prompts, self.requests, self.draws = [], [], []

    async def __call__(self, ids, request, draw):
        self.prompts.append(list(ids))
        self.requests.append(request)
        self.draws.append(draw)
        if len(ids) >= self.limit:
            raise ContextFull(len(ids), self.limit)
        text = self.texts.pop(0)
        if self.wait is not None:
            await self.wait.wait()
        if isinstance(text, Exception):
            raise text
        sampled = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        stop = next((stop for stop in request.stop if stop in text), None)
        if stop is not None:
            sampled = sampled[:-1]
        cut = request.max_tokens is not None and len(sampled) > request.max_tokens
        sampled = sampled[: request.max_tokens]
        return Sampled(sampled, [log_prob(one) for one in sampled], [7] * len(sampled), cut, None if cut else stop)


def log_prob(token):
    return -0.25 - (token % 7) / 8


@asynccontextmanager
async def served(tokenizer, policy, count=1):
    """Open sessions at one endpoint."""
    endpoint, processes = AgentEndpoint(), AgentProcesses(2)
    await endpoint.start()
    made = [
        Session(Sample(index=index, prompt=QUESTION), TurnRenderer(tokenizer), tokenizer.chat_template, *parts)
        for index, parts in enumerate([(policy, processes)] * count)
    ]
    from contextlib import ExitStack

    try:
        with ExitStack() as stack:
            for session in made:
                stack.enter_context(endpoint.serving(session))
            yield made[0] if count == 1 else made
    finally:
        await endpoint.close()
        await processes.close()


def of_openai(session, **options):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **options)


def of_anthropic(session, **options):
    return anthropic.AsyncAnthropic(base_url=session.anthropic_base_url, api_key=session.api_key, **options)


def check_recorded(sample, policy, tokenizer, texts):
    """Mask 1 exactly on what was sampled, with its log-probs and versions; each turn's prompt stands before it."""
    start = len(sample.tokens) - sample.response_length
    trained = [token for token, mask in zip(sample.tokens[start:], sample.loss_mask, strict=True) if mask]
    sampled = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert trained == [token for ids in sampled for token in ids]
    assert [value for value, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if mask] == [
        log_prob(token) for token in trained
    ]
    assert {version for version, mask in zip(sample.weight_versions, sample.loss_mask, strict=True) if mask} == {7}
    for prompt, ids in zip(policy.prompts[-len(texts) :], sampled, strict=True):
        assert sample.tokens[: len(prompt) + len(ids)] == prompt + ids


async def tool_loop_of_openai(client, stream):
    messages, answers = list(QUESTION), []
    for _ in range(5):
        if stream:
            async with client.chat.completions.stream(model="any", messages=messages, tools=[ADD]) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
        answers.append(answer)
        message = answer.choices[0].message
        messages.append(message.model_dump() if stream else message)
        if not message.tool_calls:
            return answers
        for call in message.tool_calls:
            result = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result["a"] + result["b"])})


async def tool_loop_of_anthropic(client, stream):
    messages, answers = list(QUESTION), []
    for _ in range(5):
        asked = {"model": "any", "max_tokens": 100, "messages": messages, "tools": [ADD_OF_ANTHROPIC], "system": "Add."}
        if stream:
            async with client.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": str(one.input["a"] + one.input["b"])}
            for one in answer.content
            if one.type == "tool_use"
        ]
        if not results:
            return answers
        messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_tool_loop_is_recorded_token_by_token(tokenizer, api, stream):
    policy = Policy(tokenizer, CALL, "It is 3.")

    async def episode():
        async with served(tokenizer, policy) as session:
            if api == "openai":
                answers = await tool_loop_of_openai(of_openai(session), stream)
            else:
                answers = await tool_loop_of_anthropic(of_anthropic(session), stream)
            return session, answers, session.samples(reward=0.5)

    session, answers, samples = asyncio.run(episode())
    assert len(samples) == 1 and session.num_turns == 2 and len(answers) == 2
    (sample,) = samples
    check_recorded(sample, policy, tokenizer, [CALL, "It is 3."])
    assert sample.reward == 0.5 and sample.status is Status.COMPLETED and "rewritten_turns" not in sample.metadata
    inserted = tokenizer.decode(sample.tokens)
    assert "<tool_response>\n3\n</tool_response>" in inserted and '"name": "add"' in inserted.split("user\n")[0]
    roles = [message["role"] for message in sample.metadata["messages"]]
    assert roles[-4:] == ["user", "assistant", "tool", "assistant"]
    if api == "openai":
        assert [answer.choices[0].finish_reason for answer in answers] == ["tool_calls", "stop"]
        assert answers[0].choices[0].message.content == "I add." and answers[0].model == "any"
        if not stream:
            assert answers[1].usage.prompt_tokens == len(policy.prompts[1])
    else:
        assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
        assert answers[0].content[0].text == "I add." and answers[1].usage.output_tokens > 1


def test_requests_say_what_they_want(tokenizer):
    policy = Policy(tokenizer, "One two END three", "long " * 30, CALL, CALL, "so", '1, "b": 2}}\n</tool_call>')

    async def episode():
        async with served(tokenizer, policy) as session:
            ask, made = of_openai(session).chat.completions.create, []
            options = [
                {"stop": ["END"], "logprobs": True},
                {"max_completion_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
                {"tools": [ADD], "tool_choice": "none"},
                {"tools": [ADD]},
                {},
            ]
            for index, one in enumerate(options):
                made.append(await ask(model="m", messages=[{"role": "user", "content": f"{index}?"}], **one))
            made[1] = [chunk async for chunk in made[1]]
            forced = {"type": "function", "function": {"name": "add"}}
            policy.texts = ['{"a": 1, "b": 2}}\n</tool_call>']
            made.append(await ask(model="m", messages=QUESTION, tools=[ADD], tool_choice=forced))
            return made, session.samples()

    made, samples = asyncio.run(episode())
    choice = made[0].choices[0]
    assert choice.message.content == "One two " and choice.finish_reason == "stop"
    assert [one.logprob for one in choice.logprobs.content][0] == log_prob(tokenizer("One")["input_ids"][0])
    assert made[1][-1].usage.completion_tokens == 5 and made[1][-2].choices[0].finish_reason == "length"
    assert made[2].choices[0].message.content == CALL and made[2].choices[0].message.tool_calls is None
    assert made[3].choices[0].message.tool_calls[0].function.name == "add"
    call = made[5].choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    opening = '<tool_call>\n{"name": "add", "arguments": '
    prompt = tokenizer.decode(samples[-1].tokens[: -samples[-1].response_length])
    assert prompt.endswith(opening) and samples[-1].response == '{"a": 1, "b": 2}}\n</tool_call>'
    assert len(samples) == 6 and samples[-1].metadata.get("forked") is None and samples[0].metadata["forked"]
    assert {sample.rollout_id for sample in samples} == {0}


def test_parallel_requests_and_a_changed_history_are_branches(tokenizer):
    gate = asyncio.Event()
    policy = Policy(tokenizer, "First.", *["Second."] * 4, wait=gate)

    async def episode():
        gate.set()
        async with served(tokenizer, policy) as session:
            ask = of_openai(session).chat.completions.create
            first = await ask(model="m", messages=QUESTION)
            said = [*QUESTION, {"role": "assistant", "content": first.choices[0].message.content}]
            asked = [[*said, {"role": "user", "content": text}] for text in ("Sure?", "Sure?", "Really?")]
            await asyncio.gather(*(ask(model="m", messages=messages) for messages in asked))
            await ask(model="m", messages=[{"role": "user", "content": "A summary"}])
            return session.samples(reward=1.0)

    samples = asyncio.run(episode())
    assert len(samples) == 4 and len(set(policy.draws)) == 5
    trained = [sum(sample.loss_mask) for sample in samples]
    ids = [len(tokenizer(text)["input_ids"]) + 1 for text in ("First.", "Second.")]
    assert sorted(trained) == sorted([sum(ids), ids[1], ids[1], ids[1]]), "each sampled token once"


def test_keys_open_their_own_session_until_it_ends(tokenizer):
    policy = Policy(tokenizer, *["Yes."] * 8)

    async def episode():
        async with served(tokenizer, policy, count=2) as (one, two):
            assert one.base_url.startswith("http://127.0.0.1:") and one.api_key != two.api_key
            assert [model.id async for model in of_openai(one).models.list()] == ["policy"]
            await asyncio.gather(
                *(of_openai(one).chat.completions.create(model="m", messages=QUESTION) for _ in range(2)),
                of_anthropic(two).messages.create(model="m", messages=QUESTION, max_tokens=9),
            )
            wrong = openai.AsyncOpenAI(base_url=one.base_url, api_key="sk-0-abc")
            with pytest.raises(openai.AuthenticationError) as refused:
                await wrong.chat.completions.create(model="m", messages=QUESTION)
            assert refused.value.code == "invalid_api_key" and refused.value.type == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
                await anthropic.AsyncAnthropic(base_url=one.anthropic_base_url, api_key="x").messages.create(
                    model="m", messages=QUESTION, max_tokens=9
                )
            assert (one.num_turns, two.num_turns) == (2, 1)
            assert len(one.samples()) == 2
            with pytest.raises(openai.APIStatusError) as ended:
                await of_openai(one).chat.completions.create(model="m", messages=QUESTION)
            assert ended.value.status_code == 410 and ended.value.code == "session_ended"
            await of_anthropic(two).messages.create(model="m", messages=QUESTION, max_tokens=9)
            url, key = two.base_url, two.api_key
            async with aiohttp.ClientSession() as http:
                async with http.get(f"{url}/models") as answer:
                    assert answer.status == 401
                async with http.get(f"{url}/files", headers={"Authorization": f"Bearer {key}"}) as answer:
                    assert answer.status == 404 and (await answer.json())["error"]["code"] == "unknown_url"

    asyncio.run(episode())
    assert len(policy.prompts) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 2}, "one answer a request"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]: the role must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "parts of type text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "needs a tool_call_id"),
        ({"tools": [{"name": "x"}]}, r"tools\[0\] must be"),
        ({"tool_choice": "required"}, "asks for a tool, and the tools are"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 3}, "from 0 to 2"),
        ({"max_tokens": 0}, "at least 1"),
        ({"stop": 5}, "must be str or list"),
        ({"presence_penalty": 0.5}, "not supported"),
    ],
)
def test_malformed_requests_are_told_what_is_wrong(tokenizer, change, says):
    async def episode():
        async with served(tokenizer, Policy(tokenizer)) as session:
            ask = of_openai(session).chat.completions.create
            with pytest.raises(openai.BadRequestError, match=says) as refused:
                await ask(**{"model": "m", "messages": QUESTION, **change})
            assert refused.value.type == "invalid_request_error"
            with pytest.raises(HookError, match="got no answer"):
                session.samples()

    asyncio.run(episode())


def test_malformed_messages_of_anthropic_are_told_too(tokenizer):
    async def episode():
        async with served(tokenizer, Policy(tokenizer)) as session:
            headers = {"x-api-key": session.api_key}
            bodies = [b"{", b"[]", b"{}", json.dumps({"messages": QUESTION}).encode()]
            bodies.append(json.dumps({"messages": [{"role": "user", "content": [{"type": "image"}]}]}).encode())
            async with aiohttp.ClientSession(headers=headers) as http:
                for body in bodies:
                    async with http.post(f"{session.anthropic_base_url}/v1/messages", data=body) as answer:
                        told = await answer.json()
                        assert answer.status == 400 and told["type"] == "error", told
                        assert told["error"]["type"] == "invalid_request_error"

    asyncio.run(episode())


def test_where_the_context_is_full_both_apis_say_so_in_their_words(tokenizer):
    policy = Policy(tokenizer, limit=5)

    async def episode():
        async with served(tokenizer, policy) as session:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 5 tokens") as refused:
                await of_openai(session).chat.completions.create(model="m", messages=QUESTION)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .* > 5 maximum"):
                await of_anthropic(session).messages.create(model="m", messages=QUESTION, max_tokens=9)
            (sample,) = session.samples()
            assert sample.status is Status.TRUNCATED and sample.response_length == 0

    asyncio.run(episode())


def test_a_client_that_leaves_and_an_end_abort_what_is_generated(tokenizer):
    gate = asyncio.Event()
    policy = Policy(tokenizer, *["Never."] * 3, wait=gate)

    async def episode():
        async with served(tokenizer, policy) as session:
            hasty = of_openai(session, timeout=0.3, max_retries=0)
            with pytest.raises(openai.APITimeoutError):
                await hasty.chat.completions.create(model="m", messages=QUESTION)
            waiting = asyncio.ensure_future(of_openai(session).chat.completions.create(model="m", messages=QUESTION))
            while len(policy.prompts) < 2:
                await asyncio.sleep(0.01)
            await session.close()
            with pytest.raises(openai.APIStatusError, match="has ended"):
                await waiting
            gate.set()
            await asyncio.sleep(0.05)
            assert session.num_turns == 0

    asyncio.run(episode())


def test_an_engine_that_fails_is_told_once_and_raised_where_the_samples_are_taken(tokenizer):
    policy = Policy(tokenizer, EngineError("the engine is gone"))

    async def episode():
        async with served(tokenizer, policy) as session:
            for _ in range(2):
                with pytest.raises(openai.APIStatusError, match="the engine is gone"):
                    await of_openai(session).chat.completions.create(model="m", messages=QUESTION)
            with pytest.raises(EngineError, match="the engine is gone"):
                session.samples()

    asyncio.run(episode())
    assert len(policy.prompts) == 1
