"""What both engines answer to /generate."""

import json

import pytest
import torch

from tests.engine.contract.conftest import output_log_probs

pytestmark = pytest.mark.timeout(900)  # of the first test, most of it for the start of SGLang
PROMPT = [5, 17, 99, 200, 31, 8]
TOLERANCE = 2e-4
"""Of log-probs in float32 against transformers."""


def test_an_answer_has_the_fields_of_the_contract(front):
    answer = front.generate(PROMPT, {"rid": "mine"}, max_new_tokens=6, ignore_eos=True)
    meta = answer["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["prompt_tokens"] == 6 and meta["completion_tokens"] == 6 and meta["cached_tokens"] >= 0
    assert len(answer["output_ids"]) == 6
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(entry[0] < 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 6}]
    assert answer["text"] == front.tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    assert meta["e2e_latency"] > 0


def test_log_probs_are_those_of_transformers(front):
    for temperature in (0, 1.0):
        answer = front.generate(PROMPT, max_new_tokens=24, temperature=temperature, ignore_eos=True)
        expected = front.log_probs(PROMPT, answer["output_ids"])
        torch.testing.assert_close(output_log_probs(answer), expected, atol=TOLERANCE, rtol=0)


def test_log_probs_of_another_temperature_are_those_that_were_drawn_from(front):
    answer = front.generate(PROMPT, max_new_tokens=12, temperature=0.6, ignore_eos=True)
    tokens = PROMPT + answer["output_ids"]
    with torch.no_grad():
        logits = front.model(torch.tensor([tokens])).logits[0].float() / 0.6
    expected = logits.log_softmax(-1)[5:-1].gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
    torch.testing.assert_close(output_log_probs(answer), expected, atol=TOLERANCE, rtol=0)


def test_greedy_tokens_are_the_likeliest(front):
    answer = front.generate(PROMPT, max_new_tokens=16, temperature=0, ignore_eos=True)
    with torch.no_grad():
        logits = front.model(torch.tensor([PROMPT + answer["output_ids"]])).logits[0]
    assert answer["output_ids"] == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    again = front.generate(PROMPT, max_new_tokens=16, top_k=1, ignore_eos=True)
    assert again["output_ids"] == answer["output_ids"]


def test_text_and_ids_are_the_same_prompt(front):
    text = "What is 3 + 4?"
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    by_text = front.generate(text, **params)
    assert by_text["output_ids"] == front.generate(front.tokenizer.encode(text), **params)["output_ids"]


def test_batches_come_back_in_order_with_their_own_parameters(front):
    params = [{"max_new_tokens": n, "ignore_eos": True, "temperature": 0} for n in (3, 5)]
    body = {"input_ids": [PROMPT, PROMPT[:3]], "sampling_params": params, "rid": ["x", "y"], "return_logprob": True}
    answers = front.post("/generate", body)
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert [len(answer["output_ids"]) for answer in answers] == [3, 5]
    for answer, prompt in zip(answers, (PROMPT, PROMPT[:3]), strict=True):
        expected = front.log_probs(prompt, answer["output_ids"])
        torch.testing.assert_close(output_log_probs(answer), expected, atol=TOLERANCE, rtol=0)


def test_several_samples_of_a_prompt(front):
    answers = front.generate(PROMPT, max_new_tokens=12, n=3, ignore_eos=True)
    assert len(answers) == 3 and len({tuple(answer["output_ids"]) for answer in answers}) > 1


def test_prompt_log_probs(front):
    body = {"logprob_start_len": 0}
    meta = front.generate(PROMPT, body, max_new_tokens=1, ignore_eos=True)["meta_info"]
    entries = meta["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT and entries[0][0] is None
    expected = front.log_probs(PROMPT[:1], PROMPT[1:])
    found = torch.tensor([entry[0] for entry in entries[1:]])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_without_return_logprob_there_are_none(front):
    answer = front.generate(PROMPT, {"return_logprob": False}, max_new_tokens=2)
    assert "output_token_logprobs" not in answer["meta_info"]


def test_a_stop_text_ends_the_text_before_it(front):
    whole = front.generate("What is 3 + 4?", max_new_tokens=40, temperature=0, ignore_eos=True)
    stop = next(whole["text"][at : at + 2] for at in range(8, 40) if whole["text"][at : at + 2].isascii())
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": ["never there", stop]}
    answer = front.generate("What is 3 + 4?", **params)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == whole["text"][: whole["text"].index(stop)]
    assert answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])]
    kept = front.generate("What is 3 + 4?", **params, no_stop_trim=True)
    assert kept["text"].startswith(answer["text"] + stop)


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(front):
    whole = front.generate(PROMPT, max_new_tokens=20, temperature=0, ignore_eos=True)["output_ids"]
    token = whole[7]
    at = whole.index(token)
    answer = front.generate(PROMPT, max_new_tokens=20, temperature=0, stop_token_ids=[token])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert answer["output_ids"] == whole[: at + 1]
    assert answer["text"] == front.tokenizer.decode(whole[:at], skip_special_tokens=True)


def test_the_end_of_sequence_token_ends_unless_it_is_ignored(front):
    end = front.tokenizer.eos_token_id
    probability_of_end = front.generate(PROMPT, max_new_tokens=200, temperature=3.0)
    reason = probability_of_end["meta_info"]["finish_reason"]
    assert reason in ({"type": "length", "length": 200}, {"type": "stop", "matched": end})
    assert (probability_of_end["output_ids"][-1] == end) == (reason["type"] == "stop")


def test_a_stream_ends_with_the_whole_answer(front):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
    answer = front.call("POST", "/generate", {**body, "stream": True, "return_logprob": True}, stream=True)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    texts = [json.loads(event)["text"] for event in events[:-1]]
    plain = front.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    assert texts[-1] == plain["text"] and json.loads(events[-2])["output_ids"] == plain["output_ids"]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))


# The embedded engine refuses more. To the real SGLang a token id beyond the vocabulary is the end of its scheduler, too
# few sampling_params are an internal error, and of text and input_ids together it takes one.
MALFORMED = {
    "no prompt": {},
    "no ids": {"input_ids": []},
    "ids that are a text": {"input_ids": "text"},
    "negative temperature": {"input_ids": [1, 2], "sampling_params": {"temperature": -1}},
    "top_p of 0": {"input_ids": [1, 2], "sampling_params": {"top_p": 0}},
    "unknown parameter": {"input_ids": [1, 2], "sampling_params": {"no_such_parameter": 1}},
    "negative length": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": -1}},
    "least above most": {"input_ids": [1, 2], "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 2}},
    "longer than the context": {"input_ids": [1] * 5000},
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_is_refused_with_words(front, body):
    answer = front.call("POST", "/generate", body)
    assert 400 <= answer.status_code < 500, answer.text[:500]
    assert len(answer.text) > 10
    assert front.generate(PROMPT, max_new_tokens=1)["output_ids"]


def test_what_is_not_json_is_refused(front):
    answer = front.call(
        "POST",
        "/generate",
        None,
        data=b'{"input_ids": [1',
    )
    assert 400 <= answer.status_code < 500


def test_without_the_key_nothing_is_answered_but_health(engine):
    for key in (None, "another key"):
        assert engine.call("POST", "/generate", {"input_ids": PROMPT}, key=key).status_code == 401
        assert engine.call("GET", "/server_info", key=key).status_code == 401
    assert engine.call("GET", "/health", key=None).status_code == 200
