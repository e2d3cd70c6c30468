"""pass@k and its like: against the definition, and each answer with its own prompt."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colloid import Sample
from colloid.errors import ConfigError
from colloid.rollout.scores import category_ratios, correct_metrics, pass_at_k, pass_rates, rollout_scores

STATUS = Sample.Status


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(case):
    n, c, k = case
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert pass_at_k(10_000, 0, 5_000) == 0.0


@pytest.mark.parametrize("case", [(4, 5, 1), (4, 1, 0), (4, 1, 5), (4, -1, 1)])
def test_a_count_that_cannot_be_is_refused(case):
    with pytest.raises(ValueError):
        pass_at_k(*case)


def answers(*groups):
    """Samples and rewards of groups."""
    samples = [Sample(group_index=number) for number, rewards in enumerate(groups) for _ in rewards]
    return samples, [reward for rewards in groups for reward in rewards]


def test_answers_belong_to_their_prompt_in_any_order():
    samples, rewards = answers([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0])
    expected = {"pass@1": 5 / 12, "pass@2": (1 + 0 + 1 / 2) / 3, "pass@4": 2 / 3}
    assert pass_rates(samples, rewards) == pytest.approx(expected)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(samples))
        assert pass_rates([samples[i] for i in order], [rewards[i] for i in order]) == pytest.approx(expected)


def test_what_was_not_graded_has_no_vote():
    samples, rewards = answers([1.0, None, 0.0], [None, None, 1.0], [None, None, None])
    assert pass_rates(samples, rewards) == pytest.approx({"pass@1": (0.5 + 1.0) / 2, "pass@2": 1.0})


def test_a_number_of_answers_that_is_no_power_of_two_is_the_last_k():
    assert list(pass_rates(*answers([0.0] * 6))) == ["pass@1", "pass@2", "pass@4", "pass@6"]


def test_only_a_reward_of_at_least_1_is_right():
    samples, rewards = answers([0.99, 1.5, -1.0, 1.0])
    assert pass_rates(samples, rewards)["pass@1"] == 0.5


def test_the_parts_of_a_rollout_are_one_answer():
    samples = [Sample(group_index=0, rollout_id=rollout) for rollout in (0, 0, 0, 1)]
    assert pass_rates(samples, [0.0, 0.0, 1.0, 0.0]) == {"pass@1": 0.5, "pass@2": 1.0}


def test_without_groups_or_with_one_answer_a_prompt_there_is_no_pass_at_k():
    assert pass_rates(*answers([1.0], [0.0])) == {} == pass_rates([], [])
    assert pass_rates([Sample(), Sample()], [1.0, 0.0]) == {}


def test_categories_are_shares_of_graded_samples():
    kinds = ["a", "a", "b", None]
    samples = [Sample(reward=kind and {"score": 1.0, "kind": kind}) for kind in kinds]
    assert category_ratios(samples, "kind") == {"error_cat/a": 2 / 3, "error_cat/b": 1 / 3}
    assert category_ratios([Sample(reward=1.0)], "kind") == {}


def columns(rewards, lengths):
    return SimpleNamespace(raw_rewards=np.array(rewards), response_lengths=np.array(lengths))


def test_right_and_wrong_samples_have_lengths_of_their_own():
    metrics = correct_metrics(columns([1.0, 1.0, 0.0, np.nan], [10, 20, 40, 1000]))
    assert metrics["rollout/correct/num_samples"] == 2 and metrics["rollout/correct/ratio"] == pytest.approx(2 / 3)
    assert metrics["rollout/correct/response_length"] == 15 and metrics["rollout/incorrect/response_length"] == 40
    assert metrics["rollout/correct/response_length/p50"] == 15
    assert "rollout/incorrect/response_length" not in correct_metrics(columns([1.0], [3]))
    assert correct_metrics(columns([np.nan], [3])) == {}


def test_each_option_adds_its_own():
    samples, rewards = answers([1.0, 0.0])
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward, sample.status = {"score": reward, "kind": "x"}, STATUS.COMPLETED
    options = {"log_passrate": False, "log_reward_category": None, "log_correct_samples": False, "reward_key": None}

    def made(**chosen):
        return set(rollout_scores(SimpleNamespace(**{**options, **chosen}), samples, columns(rewards, [1, 2])))

    assert made() == set()
    assert made(log_passrate=True) == {"passrate/pass@1", "passrate/pass@2"}
    assert made(log_reward_category="kind") == {"rollout/error_cat/x"}
    assert "rollout/correct/ratio" in made(log_correct_samples=True)
    with pytest.raises(ConfigError, match="--log-reward-category nothing must be a key .*'kind'"):
        made(log_reward_category="nothing")
