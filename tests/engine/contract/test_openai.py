"""The endpoints that agents with an OpenAI client use."""

import pytest

pytestmark = pytest.mark.timeout(900)  # of the first test, most of it for the start of SGLang
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]


def test_a_chat_completion_is_what_generate_says_of_its_template(engine):
    body = {"model": "any", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    answer = engine.post("/v1/chat/completions", {**body, "ignore_eos": True})
    choice = answer["choices"][0]
    ids = engine.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    plain = engine.generate(ids, max_new_tokens=6, temperature=0, ignore_eos=True)
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == plain["text"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(ids) and answer["usage"]["completion_tokens"] == 6
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert found == pytest.approx([entry[0] for entry in plain["meta_info"]["output_token_logprobs"]], abs=1e-4)


def test_a_completion_is_what_generate_says(engine):
    body = {"model": "any", "prompt": "What is 3 + 4?", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = engine.post("/v1/completions", body)
    plain = engine.generate("What is 3 + 4?", max_new_tokens=6, temperature=0, ignore_eos=True)
    assert answer["choices"][0]["text"] == plain["text"] and answer["object"] == "text_completion"


@pytest.mark.parametrize(
    "body", [{}, {"messages": "text"}, {"messages": []}, {"messages": MESSAGES, "temperature": -1}], ids=str
)
def test_a_malformed_chat_is_refused(engine, body):
    assert 400 <= engine.call("POST", "/v1/chat/completions", {"model": "any", **body}).status_code < 500
