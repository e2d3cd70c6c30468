"""Log-probs of a prompt's own tokens, as a teacher behind an engine gives them: against transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_generate import GenerateInput, SamplingParams
from colloid.engines.embedded import prompt_logprobs
from tests.engine.models import make_engine, prompt_of

pytestmark = pytest.mark.timeout(60)
VARIANT = "qwen2-tied"
LENGTH = 700  # two pieces of prefill


@pytest.fixture(scope="module")
def engine(model_paths):
    return make_engine(model_paths[VARIANT]).engine


@pytest.fixture(scope="module")
def reference(model_paths):
    """reference(prompt, temperature) -> log-prob of each prompt token but the first."""
    model = AutoModelForCausalLM.from_pretrained(model_paths[VARIANT]).eval()

    @torch.no_grad()
    def log_probs(prompt, temperature=1.0):
        logits = model(torch.tensor([prompt])).logits[0, :-1].double() / temperature
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]

    return log_probs


def ask(engine, rid, prompt, start=0, at=1.0, return_logprob=True, **params):
    params = SamplingParams.from_json({"max_new_tokens": 0, **params})
    request = GenerateInput(tuple(prompt), None, params, rid, return_logprob, start, input_logprob_temperature=at)
    sequences = engine.make_sequences(request, request.input_ids, lambda sequence: None, stream=False)
    engine.add(sequences)
    return sequences


def run(engine):
    while engine.scheduler.has_work:
        engine.step()
    assert engine.scheduler.pages.num_used == 0 and engine.scheduler._reserved == 0


def check(sequence, expected, start=0):
    values = sequence.prompt_log_probs.values
    assert values[0] is None and len(values) == len(sequence.prompt_ids) - start
    torch.testing.assert_close(torch.tensor(values[1:]).double(), expected[start:], atol=2e-5, rtol=0)


@pytest.mark.parametrize(("start", "temperature"), [(0, 1.0), (650, 1.0), (300, 0.7), (LENGTH - 1, 1.0)])
def test_they_are_those_of_the_model(engine, reference, monkeypatch, start, temperature):
    monkeypatch.setattr(prompt_logprobs, "BLOCK_ELEMENTS", 50 * 777)  # blocks of 50 rows
    prompt = prompt_of(LENGTH, 777, 3)
    (sequence,) = ask(engine, "a", prompt, start, temperature, temperature=0.3)
    run(engine)
    check(sequence, reference(prompt, temperature), start)
    assert sequence.output_ids == [] and sequence.finish_reason.to_json() == {"type": "length", "length": 0}


def test_a_prompt_in_the_cache_does_not_lose_them(engine, reference):
    prompt = prompt_of(100, 777, 4)
    plain = ask(engine, "plain", prompt, -1, return_logprob=False, max_new_tokens=40, ignore_eos=True)[0]
    for _ in range(3):
        engine.step()
    asking = [ask(engine, f"r{i}", prompt, i, max_new_tokens=5 * i, n=1 + i, ignore_eos=True) for i in range(3)]
    joining = ask(engine, "joins", prompt, -1, max_new_tokens=3, ignore_eos=True)[0]
    run(engine)
    for start, sequences in enumerate(asking):
        assert len(sequences) == 1 + start
        for sequence in sequences:
            check(sequence, reference(prompt), start)
            assert len(sequence.output_ids) == 5 * start
    assert joining.cached_tokens == 100 and joining.prompt_log_probs is None and plain.prompt_log_probs is None


def test_what_is_retracted_or_forgotten_in_the_middle_gets_them_all(engine, reference):
    prompt = prompt_of(LENGTH, 777, 5)
    sequences = [ask(engine, name, prompt, 10)[0] for name in ("a", "b")]
    engine.step()
    engine.retract()
    engine.step()
    engine.forget_prefixes()
    run(engine)
    for sequence in sequences:
        check(sequence, reference(prompt), 10)


def test_asking_for_them_changes_no_sampled_token(engine):
    prompt, params = prompt_of(60, 777, 6), {"max_new_tokens": 20, "sampling_seed": 5, "ignore_eos": True}
    outputs = []
    for start in (-1, 0):
        (sequence,) = ask(engine, "s", prompt, start, **params)
        run(engine)
        outputs.append((sequence.output_ids, sequence.log_probs))
    assert outputs[0] == outputs[1]


def test_a_start_behind_the_prompt_is_refused(engine):
    with pytest.raises(BadRequest, match="logprob_start_len .5. must be less than the prompt's 5 tokens"):
        ask(engine, "a", prompt_of(5, 700, 1), 5)


def test_the_server_gives_them_in_sglangs_form(server):
    body = {"logprob_start_len": [0, 2], "return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    whole, part = server.post("/generate", {**body, "input_ids": [[5, 6, 7, 8], [5, 6, 7, 8]]})
    entries = whole["meta_info"]["input_token_logprobs"]
    assert [entry[1:] for entry in entries] == [[5, None], [6, None], [7, None], [8, None]]
    assert entries[0][0] is None and all(entry[0] < 0 for entry in entries[1:])
    assert part["meta_info"]["input_token_logprobs"] == [[None, 7, None], entries[3]]
    assert whole["output_ids"] == [] and whole["meta_info"]["completion_tokens"] == 0
    assert whole["meta_info"]["output_token_logprobs"] == [] and whole["meta_info"]["prompt_tokens"] == 4
    warm = server.generate((5, 6, 7), max_new_tokens=0, body={"logprob_start_len": 0, "input_logprob_temperature": 2})
    assert warm["meta_info"]["input_logprob_temperature"] == 2.0
    assert warm["meta_info"]["input_token_logprobs"][1] != entries[1]
    assert server.generate((5, 6, 7), max_new_tokens=1)["meta_info"]["input_token_logprobs"] == []
    for wrong in ({"logprob_start_len": 3}, {"logprob_start_len": -2}, {"input_logprob_temperature": 0}):
        server.generate((5, 6, 7), max_new_tokens=0, body=wrong, status=400)
