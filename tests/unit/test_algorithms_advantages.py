import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.algorithms.advantages import AdvantageInputs, Moments, compute_advantages, whiten
from colloid.algorithms.estimators import ESTIMATORS
from colloid.algorithms.rewards import shape_rewards
from colloid.algorithms.segments import discounted_sums

INF, NAN = float("inf"), float("nan")


def shaped(raw, groups, estimator="grpo", valid=None, **options):
    raw = torch.tensor(raw, dtype=torch.float64)
    valid = torch.ones(len(raw), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return shape_rewards(raw, torch.tensor(groups), estimator, valid=valid, **options)


def test_grpo_subtracts_the_mean_and_divides_by_the_unbiased_std():
    rewards = shaped([1.0, 0.0, 0.0, 1.0, 3.0, 5.0], [7, 7, 7, 7, 2, 2])
    std = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64).std().item()
    assert rewards[:4].tolist() == pytest.approx(
        [0.5 / (std + 1e-6), -0.5 / (std + 1e-6)] * 1 + [-0.5 / (std + 1e-6), 0.5 / (std + 1e-6)]
    )
    assert rewards[4:].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
def test_the_mean_of_every_uneven_group_is_zero(estimator):
    torch.manual_seed(0)
    groups = torch.tensor([0] * 4 + [1] * 3 + [2] * 4)[torch.randperm(11)]
    rewards = shaped(torch.randn(11).tolist(), groups.tolist(), estimator)
    for group in range(3):
        assert rewards[groups == group].sum().item() == pytest.approx(0.0, abs=1e-12)
        assert rewards[groups == group].abs().max() > 0.1


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1 / 3, 1 / 3 + 1e-7, 1 / 3], [0.7]])
def test_a_group_of_equal_rewards_or_of_one_is_exactly_zero(estimator, rewards):
    result = shaped([*rewards, 1.0, 2.0], [0] * len(rewards) + [1, 1], estimator)
    assert result[: len(rewards)].tolist() == [0.0] * len(rewards)
    assert result[len(rewards) :].abs().min() > 0


def test_equality_is_decided_below_float32_precision():
    assert shaped([1e6, 1e6 + 0.01], [0, 0]).abs().min() > 0.5


def test_rloo_subtracts_the_mean_of_the_others():
    assert shaped([1.0, 2.0, 6.0], [0, 0, 0], "rloo").tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_without_std_normalization_the_deviation_stays():
    assert shaped([1.0, 0.0], [0, 0], std_normalization=False).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_estimators_without_a_baseline_take_the_raw_reward(estimator):
    assert shaped([1.0, 0.0, 3.0], [0, 0, 0], estimator).tolist() == [1.0, 0.0, 3.0]


def test_normalization_can_be_switched_off():
    assert shaped([1.0, NAN, 3.0], [0, 0, 0], valid=[True, False, True], normalize=False).tolist() == [1.0, 0.0, 3.0]


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@pytest.mark.parametrize("failed_reward", [NAN, INF, 99.0])
def test_failed_samples_have_no_vote(estimator, failed_reward):
    alone = shaped([1.0, 0.0, 0.0], [0, 0, 0], estimator)
    beside = shaped([1.0, failed_reward, 0.0, 0.0], [0] * 4, estimator, valid=[True, False, True, True])
    assert beside.tolist() == [alone[0], 0.0, alone[1], alone[2]]


def test_a_group_left_with_one_valid_sample_is_zero():
    assert shaped([1.0, 0.0, 5.0, 6.0], [0, 0, 1, 1], valid=[True, False, False, False]).tolist() == [0.0] * 4


def test_unknown_estimators_and_infinite_rewards_are_errors():
    with pytest.raises(ValueError, match="unknown advantage estimator 'grop': it is one of grpo"):
        shaped([1.0], [0], "grop")
    with pytest.raises(ValueError, match="not finite"):
        shaped([INF, 1.0], [0, 0])


def test_no_samples_are_no_rewards():
    assert shaped([], []).tolist() == []


def inputs_of(rewards, masks, **fields):
    lengths = torch.tensor([len(mask) for mask in masks])
    flat = torch.tensor([value for mask in masks for value in mask], dtype=torch.bool)
    fields = {name: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for name, v in fields.items()}
    sample_index = torch.repeat_interleave(torch.arange(len(masks)), lengths)
    return AdvantageInputs(torch.tensor(rewards, dtype=torch.float64), sample_index, flat, **fields)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo"])
def test_every_unmasked_token_gets_its_samples_reward(estimator):
    result = compute_advantages(estimator, inputs_of([2.0, -1.0], [[1, 0, 1], [1]]))
    assert result.advantages.tolist() == result.returns.tolist() == [2.0, 0.0, 2.0, -1.0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(0.0, 1.0), st.integers(0, 99))
@settings(deadline=None)
def test_discounted_sums_equal_the_recursion(lengths, discount, seed):
    generator = torch.Generator().manual_seed(seed)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    values = torch.randn(len(segments), generator=generator, dtype=torch.float64)
    expected = values.tolist()
    for position in range(len(expected) - 2, -1, -1):
        if segments[position] == segments[position + 1]:
            expected[position] += discount * expected[position + 1]
    assert discounted_sums(values, segments, discount).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_with_tool_tokens_equal_those_with_them_removed(estimator):
    torch.manual_seed(1)
    masks = [[1, 1, 0, 0, 1, 1, 0], [0, 1, 1], [1, 0]]
    count = sum(map(len, masks))
    kept = torch.tensor([value for mask in masks for value in mask]).bool()
    fields = {name: torch.randn(count, dtype=torch.float64) for name in ("values", "old_log_probs", "ref_log_probs")}
    options = {"kl_coef": 0.3, "gamma": 0.9, "lambd": 0.8}
    with_tools = {name: torch.where(kept, values, INF) for name, values in fields.items()}
    ours = compute_advantages(estimator, inputs_of([1.0, -2.0, 0.5], masks, **with_tools, **options))
    removed = [[1] * sum(mask) for mask in masks]
    without = {name: values[kept] for name, values in fields.items()}
    theirs = compute_advantages(estimator, inputs_of([1.0, -2.0, 0.5], removed, **without, **options))
    torch.testing.assert_close(ours.advantages[kept], theirs.advantages, rtol=0, atol=0)
    torch.testing.assert_close(ours.returns[kept], theirs.returns, rtol=0, atol=0)
    assert not ours.advantages[~kept].any()


def test_kl_enters_the_token_rewards_as_old_minus_ref():
    fields = {"old_log_probs": [-1.0, -2.0], "ref_log_probs": [-1.5, -1.0], "kl_coef": 0.1}
    baseline = compute_advantages("reinforce_plus_plus_baseline", inputs_of([1.0], [[1, 1]], **fields))
    assert baseline.advantages.tolist() == pytest.approx([1 - 0.05, 1 + 0.1])
    returns = compute_advantages("reinforce_plus_plus", inputs_of([1.0], [[1, 1]], gamma=0.5, **fields))
    assert returns.advantages.tolist() == pytest.approx([-0.05 + 0.5 * 1.1, 1.1])


def test_distillation_adds_to_any_advantage():
    fields = {"old_log_probs": [-1.0, -2.0], "teacher_log_probs": [-1.5, -1.0], "distillation_coef": 2.0}
    assert compute_advantages("grpo", inputs_of([1.0], [[1, 1]], **fields)).advantages.tolist() == [0.0, 3.0]


def test_a_missing_input_is_named():
    with pytest.raises(ValueError, match="need values"):
        compute_advantages("ppo", inputs_of([1.0], [[1]]))
    with pytest.raises(ValueError, match="need ref_log_probs"):
        compute_advantages("reinforce_plus_plus", inputs_of([1.0], [[1]], old_log_probs=[0.0], kl_coef=0.1))


def test_whitening_with_summed_moments_of_parts_equals_whitening_of_the_whole():
    torch.manual_seed(2)
    values = torch.randn(101, dtype=torch.float64) + 3
    mask = torch.rand(101) < 0.7
    kept = values[mask]
    expected = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    for cuts in ([], [50], [10, 20, 90]):
        parts = zip(torch.tensor_split(values, cuts), torch.tensor_split(mask, cuts), strict=True)
        moments = Moments(sum(Moments.of(*part).sums for part in parts))
        whitened = whiten(torch.where(mask, values, NAN), mask, moments)
        torch.testing.assert_close(whitened[mask], expected)
        assert not whitened[~mask].any()


def test_whitening_of_one_or_no_value_is_zero():
    values = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for mask in (torch.tensor([True, False]), torch.tensor([False, False])):
        assert whiten(values, mask, Moments.of(values, mask)).tolist() == [0.0, 0.0]
