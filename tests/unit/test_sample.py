"""`Sample`: what is recorded of a response grows together."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colloid import Sample

SPANS = st.lists(
    st.tuples(st.lists(st.integers(0, 99), max_size=4), st.booleans(), st.integers(0, 5)),
    max_size=6,
)


@given(SPANS)
def test_arrays_over_the_response_have_its_length_and_tokens_end_with_it(spans):
    sample = Sample(index=0, tokens=[7, 8])
    for ids, trained, version in spans:
        log_probs = [-0.5] * len(ids) if trained else None
        sample.append_response_tokens(ids, log_probs=log_probs, weight_version=version, trained=trained)
    flat = [token for ids, _, _ in spans for token in ids]
    assert sample.tokens == [7, 8, *flat]
    assert sample.response_length == len(flat)
    assert len(sample.weight_versions) == len(flat)
    assert sample.loss_mask in (None, [int(trained) for ids, trained, _ in spans for _ in ids])
    assert sample.rollout_log_probs is None or len(sample.rollout_log_probs) == len(flat)


@given(SPANS)
def test_a_sample_survives_json(spans):
    sample = Sample(index=3, group_index=1, tokens=[7], label="a", metadata={"k": [1]}, reward={"acc": 1.0})
    for ids, _, version in spans:
        sample.append_response_tokens(ids, log_probs=[-0.1] * len(ids), weight_version=version)
    sample.status = Sample.Status.TRUNCATED
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def test_reset_leaves_the_bare_prompt():
    sample = Sample(index=0, prompt="p", tokens=[1, 2], label="x")
    bare = copy.deepcopy(sample.to_dict())
    sample.append_response_tokens([5, 6], log_probs=[-1.0, -1.0], weight_version=1)
    sample.reward, sample.response, sample.status = 1.0, "text", Sample.Status.ABORTED
    sample.reset_response()
    assert sample.to_dict() == bare


def test_lengths_that_do_not_fit_are_errors_and_change_nothing():
    sample = Sample(index=0, tokens=[1])
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        sample.append_response_tokens([1, 2], log_probs=[0.0])
    with pytest.raises(ValueError, match="1 weight versions for 2 tokens"):
        sample.append_response_tokens([1, 2], weight_version=[1])
    assert (sample.tokens, sample.response_length) == ([1], 0)


def test_trained_tokens_without_log_probs_after_tokens_with_are_an_error():
    sample = Sample(index=0, tokens=[1])
    sample.append_response_tokens([2], log_probs=[-1.0])
    with pytest.raises(ValueError, match="without log-probs"):
        sample.append_response_tokens([3])


def test_the_reward_of_a_dict_needs_a_key_that_is_in_it():
    sample = Sample(index=0, reward={"accuracy": 0.5})
    assert sample.get_reward_value("accuracy") == 0.5
    with pytest.raises(ValueError, match="'accuracy'"):
        sample.get_reward_value("score")
