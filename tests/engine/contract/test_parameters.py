"""What both engines make of the less usual parameters of /generate."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.timeout(900)  # of the first test, most of it for the start of SGLang
PROMPT = [5, 17, 99, 200, 31, 8]
TOLERANCE = 2e-4
"""Of log-probs in float32 against transformers."""


def greedy(front, count: int, change) -> list[int]:
    """What transformers' likeliest tokens are where `change(logits, output so far)` comes before each choice."""
    output: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = front.model(torch.tensor([PROMPT + output])).logits[0, -1].float()
        output.append(int(change(logits, output).argmax()))
    return output


def penalized(frequency: float, presence: float, repetition: float):
    def change(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        for token in set(output):
            value = logits[token] - frequency * output.count(token) - presence
            logits[token] = value * repetition if value < 0 else value / repetition
        return logits

    return change


@pytest.mark.parametrize("penalties", [(1.5, 0.0, 1.0), (0.0, 1.2, 1.0), (0.0, 0.0, 1.7), (-0.8, 0.3, 1.2)], ids=str)
def test_penalties_count_the_output_alone(front, penalties):
    if front.kind == "sglang" and penalties[2] != 1.0:
        pytest.skip("SGLang compiles a kernel at the first repetition penalty: minutes on a CPU")
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    params = dict(zip(names, penalties, strict=True))
    answer = front.generate(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True, **params)
    expected = greedy(front, 24, penalized(*penalties))
    assert answer["output_ids"] == expected
    assert expected != greedy(front, 24, lambda logits, _: logits), "the penalties change nothing here"


def test_a_bias_forces_and_forbids_tokens(front):
    likeliest = front.generate(PROMPT, max_new_tokens=1, temperature=0, ignore_eos=True)["output_ids"][0]
    forced = front.generate(PROMPT, max_new_tokens=3, temperature=0, ignore_eos=True, logit_bias={"77": 100})
    assert forced["output_ids"] == [77, 77, 77]
    without = front.generate(PROMPT, max_new_tokens=8, ignore_eos=True, logit_bias={str(likeliest): -1000})
    assert likeliest not in without["output_ids"]


def test_an_end_of_sequence_waits_for_the_least_length(front):
    end = front.tokenizer.eos_token_id
    bias = {str(end): 100}
    for least in (0, 5):
        answer = front.generate(PROMPT, max_new_tokens=9, temperature=0, min_new_tokens=least, logit_bias=bias)
        assert len(answer["output_ids"]) == least + 1 and answer["output_ids"][-1] == end
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


def test_log_probs_of_the_likeliest_and_of_given_tokens(front):
    body = {"top_logprobs_num": 3, "token_ids_logprob": [7, 300], "return_text_in_logprobs": True}
    answer = front.generate(PROMPT, {**body, "logprob_start_len": 0}, max_new_tokens=5, ignore_eos=True)
    meta, tokens = answer["meta_info"], PROMPT + answer["output_ids"]
    with torch.no_grad():
        log_probs = front.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    for side, rows in (("output", log_probs[len(PROMPT) - 1 : -1]), ("input", log_probs[: len(PROMPT) - 1])):
        top, chosen = meta[f"{side}_top_logprobs"], meta[f"{side}_token_ids_logprobs"]
        if side == "input":
            assert top[0] is None and chosen[0] is None
            top, chosen = top[1:], chosen[1:]
        assert len(top) == len(chosen) == len(rows)
        for row, likeliest, given in zip(rows, top, chosen, strict=True):
            values, ids = row.topk(3)
            assert [entry[1] for entry in likeliest] == ids.tolist() and [entry[1] for entry in given] == [7, 300]
            found = torch.tensor([entry[0] for entry in [*likeliest, *given]])
            expected = torch.cat([values, row[[7, 300]]])
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
            assert likeliest[0][2] == front.tokenizer.decode([likeliest[0][1]])


def test_the_prompts_of_a_batch_ask_for_different_log_probs(front):
    body = {"input_ids": [PROMPT, PROMPT[:3]], "return_logprob": [True, True], "top_logprobs_num": [2, 4]}
    params = {"max_new_tokens": 2, "ignore_eos": True}
    answers = front.post("/generate", {**body, "sampling_params": params, "rid": "batch"})
    assert [len(answer["meta_info"]["output_top_logprobs"][0]) for answer in answers] == [2, 4]
    assert [answer["meta_info"]["id"] for answer in answers] == ["batch_0", "batch_1"]


def test_texts_in_a_batch_are_answered_in_order(front):
    texts = ["What is 3 + 4?", "One, two,", "a"]
    body = {"text": texts, "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
    answers = front.post("/generate", body)
    alone = [front.generate(text, max_new_tokens=6, temperature=0, ignore_eos=True) for text in texts]
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in alone]


def test_special_tokens_are_in_the_text_where_asked_for(front):
    end = front.tokenizer.eos_token_id
    params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True, "logit_bias": {str(end): 100}}
    shown = front.generate(PROMPT, skip_special_tokens=False, **params)["text"]
    assert front.tokenizer.eos_token in shown and front.generate(PROMPT, **params)["text"] == ""


def test_the_metrics_count_what_was_done(engine):
    def values() -> dict[str, float]:
        lines = engine.call("GET", "/metrics").text.splitlines()
        found: dict[str, float] = {}
        for line in lines:
            name = line.split("{")[0].split(" ")[0]
            if not line.startswith("#"):
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    names = ["generation_tokens_total", "prompt_tokens_total", "num_requests_total"]
    names += ["time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"]
    before = values()
    engine.generate(PROMPT, max_new_tokens=7, ignore_eos=True)
    after = values()
    changes = {name: after[f"sglang:{name}"] - before.get(f"sglang:{name}", 0.0) for name in names}
    assert changes["generation_tokens_total"] == 7 and changes["num_requests_total"] == 1
    assert changes["time_to_first_token_seconds_count"] == changes["e2e_request_latency_seconds_count"] == 1
    assert {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"} <= set(after)
