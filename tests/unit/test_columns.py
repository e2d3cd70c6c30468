import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.data.columns import reward_values, to_columns, voting_samples
from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError, DataError


def make_sample(index, mask, *, prompt=2, rollout_id=None, reward=1.0, **fields):
    length = len(mask)
    tokens = [100 * index + position for position in range(prompt + length)]
    fields = {"status": Status.COMPLETED, "group_index": index // 2, **fields}
    return Sample(
        index=index,
        rollout_id=rollout_id,
        tokens=tokens,
        response_length=length,
        loss_mask=mask,
        reward=reward,
        **fields,
    )


def columns_of(samples, num_steps=1, per_token_loss=False, rewards=None):
    raw = reward_values(samples)
    shaped = raw if rewards is None else rewards
    return to_columns(samples, raw_rewards=raw, rewards=shaped, num_steps=num_steps, per_token_loss=per_token_loss)


def step_sums(batch):
    """Sum of the weights of unmasked tokens, for each step."""
    weights = np.repeat(batch.loss_weights, batch.response_lengths) * batch.loss_mask
    return np.bincount(np.repeat(batch.steps, batch.response_lengths), weights=weights)


def test_columns_hold_each_samples_arrays_in_order():
    first = make_sample(0, [1, 0, 1], rollout_log_probs=[-1.0, 0.0, -3.0], weight_versions=[4, -1, 5])
    second = make_sample(1, [1], prompt=3, reward=-2.0)
    batch = columns_of([first, second])
    assert batch.tokens.tolist() == [0, 1, 2, 3, 4, 100, 101, 102, 103]
    assert batch.offsets.tolist() == [0, 5, 9] and batch.response_offsets.tolist() == [0, 3, 4]
    assert batch.loss_mask.tolist() == [1, 0, 1, 1]
    assert batch.rollout_log_probs[:3].tolist() == [-1.0, 0.0, -3.0] and np.isnan(batch.rollout_log_probs[3])
    assert batch.weight_versions.tolist() == [4, -1, 5, -1]
    assert batch.sample_ids.tolist() == [0, 1] and batch.rollout_ids.tolist() == [0, 1]
    assert batch.raw_rewards.tolist() == [1.0, -2.0]
    assert batch.rollout_tokens.tolist() == [2, 1]
    dtypes = {"tokens": "int32", "loss_mask": "uint8", "rollout_log_probs": "float32", "loss_weights": "float64"}
    assert {name: getattr(batch, name).dtype.name for name in dtypes} == dtypes


def test_every_rollout_weighs_the_same_by_default():
    batch = columns_of([make_sample(0, [1, 0, 1]), make_sample(1, [1])])
    assert batch.loss_weights.tolist() == [1 / 4, 1 / 2]


def test_every_token_weighs_the_same_with_per_token_loss():
    batch = columns_of([make_sample(0, [1, 0, 1]), make_sample(1, [1])], per_token_loss=True)
    assert batch.loss_weights.tolist() == [1 / 3, 1 / 3]


@pytest.mark.parametrize("per_token_loss", [False, True])
def test_siblings_weigh_as_the_one_rollout_that_they_were_split_from(per_token_loss):
    mask = [1, 1, 0, 1, 1, 1]
    whole = columns_of([make_sample(0, mask, rollout_id=7), make_sample(9, [1, 1])], per_token_loss=per_token_loss)
    parts = [make_sample(0, mask[:2], rollout_id=7), make_sample(9, [1, 1]), make_sample(1, mask[2:], rollout_id=7)]
    split = columns_of(parts, per_token_loss=per_token_loss)
    assert split.loss_weights[0] == split.loss_weights[2] == whole.loss_weights[0]
    assert split.loss_weights[1] == whole.loss_weights[1]
    assert split.rollout_tokens.tolist() == [5, 2, 5]


def test_failed_samples_are_in_no_denominator():
    samples = [make_sample(0, [1, 1]), make_sample(1, [1, 1, 1], status=Status.FAILED, reward=None)]
    batch = columns_of(samples)
    assert batch.loss_mask.tolist() == [1, 1, 0, 0, 0]
    assert batch.loss_weights.tolist() == [1 / 2, 0.0]
    assert np.isnan(batch.raw_rewards[1]) and batch.rewards[1] == 0.0
    assert voting_samples(samples).tolist() == [True, False]


def test_a_failed_sibling_leaves_its_rollout_in_the_denominator():
    samples = [make_sample(0, [1, 1], rollout_id=5), make_sample(1, [1], rollout_id=5, status=Status.FAILED)]
    batch = columns_of([*samples, make_sample(2, [1])])
    assert batch.loss_weights.tolist() == [1 / 4, 0.0, 1 / 2]


@pytest.mark.parametrize(
    "fields", [{"remove_sample": True}, {"loss_mask": [0, 0, 0]}, {"response_length": 0, "loss_mask": None}]
)
def test_a_rollout_masked_for_another_reason_counts_as_one_with_loss_zero(fields):
    masked = make_sample(1, [1, 1, 1])
    for name, value in fields.items():
        setattr(masked, name, value)
    batch = columns_of([make_sample(0, [1, 1]), masked])
    assert batch.loss_mask[2:].sum() == 0
    assert batch.loss_weights.tolist() == [1 / 4, 0.0]


def test_no_mask_means_that_every_response_token_is_trained():
    sample = make_sample(0, [1, 1])
    sample.loss_mask = None
    assert columns_of([sample]).loss_mask.tolist() == [1, 1]


def test_steps_take_rollouts_in_order_and_keep_siblings_together():
    order = [3, 1, 3, 0, 2, 1]
    samples = [make_sample(index, [1], rollout_id=rollout) for index, rollout in enumerate(order)]
    batch = columns_of(samples, num_steps=2)
    assert batch.steps.tolist() == [0, 0, 0, 1, 1, 0]
    assert step_sums(batch) == pytest.approx([1.0, 1.0])


def test_steps_that_do_not_divide_the_rollouts_show_the_numbers():
    samples = [make_sample(index, [1]) for index in range(7)]
    with pytest.raises(ConfigError, match=r"7 rollouts .* 2 optimizer steps: 7 = 2 x 3 \+ 1"):
        columns_of(samples, num_steps=2)


@given(
    masks=st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=12),
    data=st.data(),
    per_token_loss=st.booleans(),
)
@settings(deadline=None)
def test_weights_of_a_step_sum_to_its_share_of_trained_rollouts(masks, data, per_token_loss):
    count = len(masks)
    rollouts = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    failed = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    removed = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    samples = [
        make_sample(
            index, mask, rollout_id=rollouts[index], remove_sample=removed[index],
            status=Status.FAILED if failed[index] else Status.COMPLETED,
        )
        for index, mask in enumerate(masks)
    ]  # fmt: skip
    alive = {r for r, f in zip(rollouts, failed, strict=True) if not f}
    trained = {
        r for r, f, x, m in zip(rollouts, failed, removed, masks, strict=True) if not f and not x and any(m)
    }  # fmt: skip
    expected = 1.0 * bool(trained) if per_token_loss else len(trained) / max(len(alive), 1)
    assert step_sums(columns_of(samples, per_token_loss=per_token_loss)).sum() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1, 1, 1]}, r"sample 0: loss_mask has 3 entries for a response of 2 tokens"),
        ({"rollout_log_probs": [0.0]}, r"sample 0: rollout_log_probs has 1 entries for a response of 2 tokens"),
        ({"weight_versions": [1]}, r"sample 0: weight_versions has 1 entries"),
        ({"response_length": 9, "loss_mask": None}, r"sample 0: response_length is 9, and there are 4 tokens"),
        ({"loss_mask": [1, 2]}, r"sample 0: loss_mask has entries other than 0 and 1"),
        ({"group_index": None}, r"position 0 \(index 0\) has no group_index"),
        ({"index": None}, r"position 0 \(index None\) has no index"),
    ],
)
def test_arrays_that_do_not_fit_are_errors_that_name_the_sample(change, message):
    sample = make_sample(0, [1, 1])
    for name, value in change.items():
        setattr(sample, name, value)
    with pytest.raises(DataError, match=message):
        columns_of([sample])


@pytest.mark.parametrize(
    ("reward", "message"), [(None, "has no reward"), (float("nan"), "must be finite"), ({"a": 1.0}, "--reward-key")]
)
def test_a_reward_that_is_no_number_is_an_error(reward, message):
    with pytest.raises(DataError, match=message):
        reward_values([make_sample(3, [1], reward=reward)])


def test_a_dict_reward_is_read_by_its_key():
    assert reward_values([make_sample(0, [1], reward={"a": 2.0, "b": 3.0})], "b").tolist() == [3.0]


def test_rewards_of_another_length_are_an_error():
    with pytest.raises(DataError, match=r"rewards has the shape \[2\] for 1 samples"):
        columns_of([make_sample(0, [1])], rewards=np.zeros(2))


def test_no_samples_are_an_error():
    with pytest.raises(DataError, match="without samples"):
        columns_of([])
