"""Train data of one's own: a dict of lists becomes columns, and what cannot be used is named."""

from __future__ import annotations

import numpy as np
import pytest

from colloid import Sample
from colloid.errors import DataError, HookError
from colloid.rollout.batching import rollout_batch
from tests.unit.test_step_advantages import plan

STATUS = Sample.Status


def make_samples():
    samples = []
    for index in range(4):
        sample = Sample(index=index, group_index=index // 2, tokens=[1, 2], reward=float(index))
        sample.append_response_tokens([3, 4, 5], log_probs=[-1.0, -2.0, -3.0], weight_version=1)
        sample.status = STATUS.COMPLETED
        samples.append(sample)
    return samples


CONVERT = """
def convert_samples_to_train_data(args, samples):
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [0.5 * sample.reward for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "loss_masks": [[0, 1, 1]] * len(samples),
        "truncated": [0] * len(samples),
        "sample_indices": [sample.index for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }
"""


def convert(tmp_path, text, samples=None, options=()):
    path = tmp_path / f"convert{len(list(tmp_path.iterdir()))}.py"  # a file is imported once
    path.write_text(text)
    given = " ".join(["--custom-convert-samples-to-train-data-path", str(path), *options])
    return rollout_batch(plan(given), samples or make_samples())


def test_train_data_of_ones_own_becomes_columns(tmp_path):
    batch = convert(tmp_path, CONVERT)
    assert batch.rewards.tolist() == [0.0, 0.5, 1.0, 1.5] and batch.raw_rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert batch.loss_mask.tolist() == [0, 1, 1] * 4 and batch.group_ids.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(batch.rollout_log_probs[:3], np.float32([-1.0, -2.0, -3.0]))
    assert batch.rollout_tokens.tolist() == [2] * 4


def test_one_sample_may_become_several_rows_that_weigh_as_one(tmp_path):
    text = CONVERT.replace("return {", "samples = [s for s in samples for _ in range(2)]\n    return {")
    batch = convert(tmp_path, text)
    assert batch.num_samples == 8 and batch.rollout_tokens.tolist() == [4] * 8


def test_what_a_teacher_said_is_handed_on(tmp_path):
    teacher = ("--use-opd", "--opd-type", "sglang", "--rm-url", "http://127.0.0.1:1")
    with pytest.raises(DataError, match="4 of 4 samples have no teacher_log_probs.*where it returns teacher_log_probs"):
        convert(tmp_path, CONVERT, options=teacher)
    text = CONVERT.replace("return {", 'return {\n        "teacher_log_probs": [[-1.0, -2.0, -4.0]] * len(samples),')
    batch = convert(tmp_path, text, options=teacher)
    np.testing.assert_array_equal(batch.teacher_log_probs, np.float32([-1.0, -2.0, -4.0] * 4))


def test_a_sample_that_failed_stays_without_a_vote(tmp_path):
    samples = make_samples()
    samples[1].status, samples[1].reward = STATUS.FAILED, None
    text = CONVERT.replace("0.5 * sample.reward", "sample.reward")
    batch = convert(tmp_path, text, samples)
    assert np.isnan(batch.raw_rewards).tolist() == [False, True, False, False]
    assert (batch.loss_weights == 0).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"tokens"', '"token_ids"'), "the dict lacks tokens"),
        (('"truncated"', '"round_number"'), "nothing reads round_number; the keys are tokens"),
        (("[0] * len(samples)", "[0]"), "tokens has 4 entries, truncated has 1"),
        (("[[0, 1, 1]]", "[[0, 1]]"), r"loss_masks\[0\] has 2 entries for a response of 3 tokens"),
        (("sample.response_length for", "9 for"), r"has 3 entries for a response of 9|response_lengths\[0\] is 9"),
        (("[sample.index for", "[99 for"), r"sample_indices\[0\] is 99, and the rollout has no such sample"),
        (("0.5 * sample.reward", 'float("nan")'), r"rewards\[0\] \(sample 0\) is nan; it must be finite"),
        (("[[0, 1, 1]]", "[[0, 2, 1]]"), "entries other than 0 and 1"),
        (("return {", "return [] and {"), "must return a dict of lists, and returned list"),
    ],
)
def test_train_data_that_cannot_be_used_is_named(tmp_path, change, message):
    assert change[0] in CONVERT
    with pytest.raises(HookError, match=f"--custom-convert-samples-to-train-data-path .*convert0.py.*({message})"):
        convert(tmp_path, CONVERT.replace(*change, 1))
