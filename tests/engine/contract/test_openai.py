"""The endpoints that agents with an OpenAI client use."""

import pytest

pytestmark = pytest.mark.timeout(900)  # of the first test, most of it for the start of SGLang
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]


def test_a_chat_completion_is_what_generate_says_of_its_template(front):
    body = {"model": front.name, "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    answer = front.post("/v1/chat/completions", {**body, "ignore_eos": True})
    choice = answer["choices"][0]
    ids = front.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    plain = front.generate(ids, max_new_tokens=6, temperature=0, ignore_eos=True)
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == plain["text"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(ids) and answer["usage"]["completion_tokens"] == 6
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert found == pytest.approx([entry[0] for entry in plain["meta_info"]["output_token_logprobs"]], abs=1e-4)


def test_a_completion_is_what_generate_says(front):
    body = {"model": front.name, "prompt": "What is 3 + 4?", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = front.post("/v1/completions", body)
    plain = front.generate("What is 3 + 4?", max_new_tokens=6, temperature=0, ignore_eos=True)
    assert answer["choices"][0]["text"] == plain["text"] and answer["object"] == "text_completion"


@pytest.mark.parametrize(
    "body", [{}, {"messages": "text"}, {"messages": []}, {"messages": MESSAGES, "temperature": -1}], ids=str
)
def test_a_malformed_chat_is_refused(front, body):
    assert 400 <= front.call("POST", "/v1/chat/completions", {"model": front.name, **body}).status_code < 500


@pytest.fixture(scope="module")
def client(front):
    openai = pytest.importorskip("openai")
    from tests.engine.contract.conftest import KEY

    return openai.OpenAI(base_url=f"{front.url}/v1", api_key=KEY, timeout=60, max_retries=0)


def test_the_openai_client_streams_a_chat_with_its_usage(front, client):
    params = {
        "model": front.name,
        "messages": MESSAGES,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    own = {"ignore_eos": True}
    whole = client.chat.completions.create(**params, extra_body=own)
    chunks = list(
        client.chat.completions.create(**params, extra_body=own, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(delta.delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert deltas[0].delta.role == "assistant"
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    streamed = [entry for delta in deltas if delta.logprobs for entry in delta.logprobs.content]
    for entry in streamed:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)
    if front.kind == "embedded":  # SGLang leaves out those of tokens that complete no character
        expected = [entry.logprob for entry in whole.choices[0].logprobs.content]
        assert [entry.logprob for entry in streamed] == pytest.approx(expected, abs=1e-4)


def test_the_openai_client_gets_several_choices_and_stops(front, client):
    answer = client.chat.completions.create(
        model=front.name, messages=MESSAGES, max_tokens=6, n=3, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and answer.usage.completion_tokens == 18
    text = client.completions.create(model=front.name, prompt="One, two", max_tokens=20, temperature=0).choices[0].text
    stop = text[3:5]
    stopped = client.completions.create(model=front.name, prompt="One, two", max_tokens=20, temperature=0, stop=[stop])
    assert stopped.choices[0].text == text[: text.index(stop)] and stopped.choices[0].finish_reason == "stop"


def test_the_openai_client_completes_several_prompts(front, client):
    prompts = ["One, two", "What is 3 + 4?"]
    params = {"model": front.name, "max_tokens": 5, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=prompts, **params)
    alone = [client.completions.create(prompt=prompt, **params).choices[0].text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == alone
    streamed = client.completions.create(prompt=prompts[0], stream=True, **params)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == alone[0]


def test_a_completion_echoes_its_prompt_with_log_probs(front, client):
    params = {"model": front.name, "prompt": "One, two", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**params, echo=True, extra_body={"ignore_eos": True}).choices[0]
    alone = client.completions.create(**params, extra_body={"ignore_eos": True}).choices[0]
    assert answer.text == "One, two" + alone.text
    count = len(front.tokenizer.encode("One, two"))
    assert len(answer.logprobs.tokens) == count + 3 and answer.logprobs.token_logprobs[0] is None
    assert answer.logprobs.token_logprobs[count:] == pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)
    assert all(len(top) <= 2 for top in alone.logprobs.top_logprobs)


def test_parts_of_text_are_one_message(front):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "3 + 4?"}]
    body = {"model": front.name, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    plain = front.post("/v1/chat/completions", {**body, "messages": MESSAGES})
    parted = front.post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": parts}]})
    assert parted["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert parted["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]


def test_the_openai_client_lists_the_model_and_hears_why_a_request_is_refused(front, client):
    import openai

    (model,) = client.models.list()
    assert model.id == front.name
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=front.name, messages=MESSAGES, temperature=-1)


def test_a_model_is_found_by_its_name(engine):
    """sglang-router has no such path."""
    assert engine.call("GET", f"/v1/models/{engine.name}").json()["id"] == engine.name
