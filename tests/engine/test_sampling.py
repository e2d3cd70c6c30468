"""The sampler: distribution, filters, log-probs, rows that do not influence each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.engines.embedded.sampling import RowParams, draw, filtered, sample
from tests.engine.models import add, make_engine, prompt_of, run

pytestmark = pytest.mark.timeout(60)


def weights_of(vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.softmax(torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread, -1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1500), st.integers(0, 10**6), st.floats(0, 1, exclude_max=True, width=32), st.floats(0, 0.99))
def test_draw_is_the_inverse_of_the_cumulative_distribution(vocab, seed, uniform, cut):
    weights = weights_of(vocab, seed)
    weights = torch.where(weights < cut * weights.max(), 0, weights)
    index = int(draw(weights[None], torch.tensor([uniform]))[0])
    assert weights[index] > 0
    cumulative = weights.double().cumsum(0)
    target = uniform * float(cumulative[-1])
    below = float(cumulative[index - 1]) if index else 0.0
    assert below - 1e-5 <= target <= float(cumulative[index]) + 1e-5


def test_frequencies_follow_the_probabilities():
    weights = weights_of(700, 1)
    uniforms = (torch.arange(20000) + 0.5) / 20000
    counts = torch.bincount(draw(weights.expand(20000, -1), uniforms), minlength=700) / 20000
    assert (counts - weights).abs().max() < 2e-4


def slow_filter(weights: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    kept, total = set(), 0.0
    for rank, index in enumerate(sorted(range(len(weights)), key=lambda i: -float(weights[i]))):
        if (0 < top_k <= rank) or (total >= top_p and rank) or float(weights[index]) < min_p * float(weights.max()):
            break
        kept.add(index)
        total += float(weights[index])
    return kept


@pytest.mark.parametrize("vocab", [1, 40, 1024, 3000])
@pytest.mark.parametrize("spread", [0.01, 3.0])
@pytest.mark.parametrize("top", [(-1, 0.5, 0.0), (3, 1.0, 0.0), (-1, 1.0, 0.2), (50, 0.9, 0.01), (2000, 0.999, 0.0)])
def test_filters_keep_what_a_plain_loop_keeps(vocab, spread, top):
    weights = weights_of(vocab, vocab, spread)
    kept = filtered(weights, *top)
    assert set(kept.nonzero()[:, 0].tolist()) == slow_filter(weights, *top)
    assert torch.equal(kept[kept > 0], weights[kept > 0])


def test_log_probs_are_of_the_whole_softmax_at_the_temperature_whatever_is_cut_off():
    logits = torch.randn(5, 1003, generator=torch.Generator().manual_seed(0)) * 4
    suppressed = (int(logits[4].argmax()),)
    rows = [
        RowParams(0.5, 0.3),
        RowParams(1.0, 0.3, top_k=4),
        RowParams(2.0, 0.99, top_p=0.3),
        RowParams(0.0, 0.3, greedy=True),
        RowParams(0.7, 0.3, suppressed=suppressed),
    ]
    tokens, log_probs = sample(logits.clone(), rows)
    for i, row in enumerate(rows):
        expected = torch.log_softmax(logits[i].double() / (row.temperature or 1.0), -1)[tokens[i]]
        assert log_probs[i] == pytest.approx(float(expected), abs=1e-5)
    assert tokens[3] == int(logits[3].argmax()) and tokens[4] not in suppressed


def test_what_is_left_beside_a_certain_suppressed_token_still_has_a_finite_log_prob():
    logits = torch.zeros(1, 300)
    logits[0, 7] = 400.0
    tokens, log_probs = sample(logits, [RowParams(1.0, 0.5, suppressed=(7,))])
    assert tokens[0] != 7 and log_probs[0] == pytest.approx(-400.0)


def test_logits_that_are_not_finite_end_the_request_and_only_it(model_paths):
    engine = make_engine(model_paths["llama-gqa-tied"]).engine
    engine.model.final_norm[0] = math.nan
    (broken,) = add(engine, "a", prompt_of(5, 500, 1), max_new_tokens=5)
    run(engine)
    assert broken.finish_reason.type == "abort" and "not finite" in broken.finish_reason.message


def test_min_new_tokens_holds_back_end_of_sequence_and_stop_tokens(model_paths):
    engine = make_engine(model_paths["llama-gqa-tied"]).engine
    stops = list(range(0, 1003, 2))
    for minimum in (0, 12):
        (sequence,) = add(
            engine, "a", prompt_of(9, 500, 2), max_new_tokens=40, min_new_tokens=minimum, stop_token_ids=stops
        )
        run(engine)
        assert sequence.finish_reason.type == "stop" and sequence.finish_reason.matched == sequence.output_ids[-1]
        assert len(sequence.output_ids) > minimum
        assert all(token % 2 for token in sequence.output_ids[:-1])


def test_same_seed_same_tokens_and_no_seed_other_tokens(model_paths):
    engine = make_engine(model_paths["llama-gqa-tied"]).engine
    outputs = []
    for i, seed in enumerate((5, 5, 6, None, None)):
        outputs += add(engine, f"s{i}", prompt_of(9, 500, 2), max_new_tokens=20, sampling_seed=seed, ignore_eos=True)
    run(engine)
    a, b, c, d, e = (sequence.output_ids for sequence in outputs)
    assert a == b and len({tuple(x) for x in (a, c, d, e)}) == 4
