"""Users' functions for advantages and for the correction of the policy loss see samples, and are checked."""

import numpy as np
import pytest
import torch

from colloid.algorithms.corrections import CorrectionInputs
from colloid.errors import DataError, HookError
from colloid.rollout.batching import rollout_batch
from colloid.training.advantages import AdvantageConfig, step_advantages
from colloid.training.custom import custom_correction
from colloid.training.loss_options import advantage_config, custom_tis, objective_config
from colloid.training.micro_batch import make_micro_batch
from tests.parallel.rollouts import make_rollout
from tests.unit.test_step_advantages import plan

BATCH = make_rollout()
PARTS = [make_micro_batch(BATCH, np.asarray(rows)) for rows in ([0, 1, 2], [3, 4, 5, 6, 7])]


def correction_inputs(part, **fields):
    count = len(part.loss_mask)
    blank = torch.zeros(count)
    fields = {"trainer_log_probs": blank, "rollout_log_probs": blank} | fields
    return CorrectionInputs(
        blank,
        blank,
        advantages=blank,
        sample_index=part.sample_index,
        loss_mask=part.loss_mask,
        num_samples=part.num_samples,
        **fields,
    )


def test_a_custom_correction_sees_samples_and_changes_loss_and_mask():
    part, seen = PARTS[1], {}

    def function(**given):
        seen.update(given)
        masks = [torch.zeros_like(mask) if row == 1 else mask for row, mask in enumerate(given["loss_masks"])]
        return given["pg_loss"] * 2, masks, {"doubled": 2.0, "length": [m * len(m) for m in masks]}

    loss = torch.arange(len(part.loss_mask)).float()
    corrected, kept, metrics = custom_correction(function, part)(loss, correction_inputs(part))
    assert torch.equal(corrected, loss * 2)
    assert torch.equal(kept, part.loss_mask & (part.sample_index != 1))
    assert sorted(metrics) == ["doubled", "length"]
    assert metrics["doubled"][0].tolist() == [2.0] * len(loss)
    assert [len(mask) for mask in seen["loss_masks"]] == seen["response_lengths"] == part.response_lengths.tolist()
    assert seen["total_lengths"] == sorted(BATCH.lengths[3:].tolist(), reverse=True)
    assert torch.equal(torch.cat(seen["loss_masks"]).bool(), part.loss_mask)


def test_without_log_probs_to_compare_a_custom_correction_is_not_called():
    part = PARTS[0]
    loss = torch.ones(len(part.loss_mask))
    same, kept, metrics = custom_correction(None, part)(loss, correction_inputs(part, trainer_log_probs=None))
    assert same is loss and torch.equal(kept, part.loss_mask) and metrics == {}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"must return \(pg_loss, loss_masks, metrics\), not NoneType"),
        ((torch.zeros(3), None, {}), r"pg_loss has the shape \[3\] for"),
        ((1.0, [torch.zeros(2)], {}), r"loss_masks has the shape \[2\]"),
    ],
)
def test_what_a_custom_correction_returns_is_checked(returned, message):
    part = PARTS[0]
    with pytest.raises(HookError, match=message):
        custom_correction(lambda **given: returned, part)(torch.zeros(len(part.loss_mask)), correction_inputs(part))


def advantages_of(function, normalize=False):
    config = AdvantageConfig("grpo", normalize=normalize, custom=function)
    log_probs = [torch.zeros(len(part.loss_mask)) for part in PARTS]
    return step_advantages(config, PARTS, old=log_probs, reference=None, sum_over_ranks=lambda sums: sums)


def by_length(data):
    data["advantages"] = [torch.full((n,), float(n)) for n in data["response_lengths"]]


def test_a_custom_advantage_is_set_for_every_sample_of_the_step():
    for part, values in zip(PARTS, advantages_of(by_length), strict=True):
        expected = torch.from_numpy(part.response_lengths.astype(float))[part.sample_index]
        assert torch.equal(values, torch.where(part.loss_mask, expected, 0.0))
    whole = torch.cat(advantages_of(by_length, normalize=True))
    mask = torch.cat([part.loss_mask for part in PARTS])
    assert whole[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert whole[mask].std().item() == pytest.approx(1)


def test_a_custom_advantage_has_what_estimators_have():
    seen = {}

    def function(data):
        seen.update(data)
        by_length(data)

    advantages_of(function)
    assert sorted(seen) == [
        "log_probs",
        "loss_masks",
        "response_lengths",
        "rewards",
        "rollout_log_probs",
        "total_lengths",
    ]
    assert {len(column) for column in seen.values()} == {8}


@pytest.mark.parametrize("wrong", [None, [torch.zeros(1)], [torch.zeros(1)] * 8])
def test_a_custom_advantage_is_checked(wrong):
    with pytest.raises(HookError, match="advantages"):
        advantages_of(lambda data: data.update(advantages=wrong))


HOOKS = """
def custom_tis(args, *, pg_loss, rollout_log_probs, **kw):
    return pg_loss * args.tis_clip, None, {}

def custom_advantage(args, rollout_data):
    rollout_data["advantages"] = rollout_data["loss_masks"]
"""


def test_hooks_are_loaded_from_the_options(tmp_path):
    (tmp_path / "mine.py").write_text(HOOKS)
    args = plan(
        f"--use-tis --tis-clip 3 --custom-tis-function-path {tmp_path}/mine.py "
        f"--custom-advantage-function-path {tmp_path}/mine.py"
    )
    assert not objective_config(args).correction.use_tis
    loss = torch.ones(len(PARTS[0].loss_mask))
    assert custom_correction(custom_tis(args), PARTS[0])(loss, correction_inputs(PARTS[0]))[0].unique().tolist() == [3]
    data = {"loss_masks": [1]}
    advantage_config(args).custom(data)
    assert data["advantages"] == [1]
    assert custom_tis(plan("")) is None and advantage_config(plan("")).custom is None


def test_rollout_log_probs_that_the_loss_needs_are_demanded():
    from tests.parallel.options_cases import make_samples

    args = plan("--use-rollout-logprobs --rollout-batch-size 2 --n-samples-per-prompt 4")
    samples = make_samples()
    rollout_batch(args, samples)
    samples[3].rollout_log_probs = None
    with pytest.raises(DataError, match=r"1 of 8 samples have no rollout log-probs: \[3\]"):
        rollout_batch(args, samples)
    samples[3].remove_sample = True
    rollout_batch(args, samples)
