"""Corrections of the policy loss, by their formulas, sample by sample."""

import math
from dataclasses import replace

import pytest
import torch

from colloid.algorithms.corrections import CorrectionConfig, CorrectionInputs, correct
from colloid.algorithms.losses import POLICY_LOSSES
from colloid.algorithms.objective import ObjectiveConfig, objective
from tests.unit.test_algorithms_objective import make_inputs, run, split, value

NAN = float("nan")
LENGTHS = (4, 3, 5)


def rollout_inputs(spread=0.5, **fields):
    """Engine log-probs further off than a good engine's; the second sample has none."""
    inputs = make_inputs(**{"lengths": LENGTHS} | fields)
    count = len(inputs.loss_mask)
    noise = torch.randn(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rollout = inputs.old_log_probs + spread * noise
    rollout[4:7] = NAN
    return replace(inputs, rollout_log_probs=rollout)


def samples(inputs):
    """(positions of the unmasked tokens, their log-ratios) of each sample."""
    found = []
    for sample in range(inputs.num_samples):
        rows = ((inputs.sample_index == sample) & inputs.loss_mask).nonzero().squeeze(-1)
        found.append((rows, (inputs.old_log_probs - inputs.rollout_log_probs)[rows]))
    return found


def ratio_of(log_ratios, level):
    """[unmasked tokens of the sample]."""
    if level == "token":
        return log_ratios.exp()
    whole = log_ratios.sum() if level == "sequence" else log_ratios.mean()
    return whole.exp().expand(len(log_ratios))


def weights_of(inputs, expected_of):
    """[R] by a formula for a sample's log-ratios; 1 without log-probs of the engine."""
    weights = torch.zeros(12, dtype=torch.float64)
    for rows, log_ratios in samples(inputs):
        weights[rows] = 1.0 if log_ratios.isnan().any() else expected_of(log_ratios).double()
    return weights


def pg_loss(inputs, weights, config):
    """The weighted policy loss, token by token."""
    plain = replace(config, correction=CorrectionConfig())
    total = 0.0
    for row in inputs.loss_mask.nonzero().squeeze(-1).tolist():
        one = torch.zeros(12, dtype=torch.float64)
        one[row] = 1 / 12
        total += weights[row] * objective(replace(inputs, token_weights=one), plain)[0].item()
    return float(total)


def bounded(ratio, mode, low, high):
    if mode == "clip":
        return ratio.clamp(low, high)
    if mode == "truncate":
        return ratio.clamp(max=high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("mode", ["clip", "truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_sampling_is_its_formula(level, mode, loss):
    inputs = rollout_inputs()
    correction = CorrectionConfig(use_tis=True, tis_level=level, tis_mode=mode, tis_clip=1.02, tis_clip_low=0.98)
    config = ObjectiveConfig(policy_loss=loss, correction=correction)
    weights = weights_of(inputs, lambda log_ratios: bounded(ratio_of(log_ratios, level), mode, 0.98, 1.02))
    total, metrics, _, _ = run(inputs, config)
    assert total == pytest.approx(pg_loss(inputs, weights, config), rel=1e-9)
    known = inputs.loss_mask & ~inputs.rollout_log_probs.isnan()
    assert value(metrics, "tis") == pytest.approx(weights[known].mean().item())
    assert 0 < value(metrics, "tis_clipfrac") <= 1


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bounds", [(1.0, None), (None, 1.0), (0.98, 1.02)])
def test_rejection_is_its_formula(level, bounds):
    inputs, (low, high) = rollout_inputs(), bounds
    correction = CorrectionConfig(rs_level=level, rs_lower_bound=low, rs_upper_bound=high)
    config = ObjectiveConfig(correction=correction)

    def kept(log_ratios):
        ratio = ratio_of(log_ratios, level)
        return (ratio >= (low or 0)) & (ratio <= (high or math.inf))

    weights = weights_of(inputs, kept)
    total, metrics, _, _ = run(inputs, config)
    assert total == pytest.approx(pg_loss(inputs, weights, config), rel=1e-9)
    rejected = value(metrics, "rs_rejected")
    assert rejected == pytest.approx(1 - weights[inputs.loss_mask].mean().item())
    assert rejected > 0


def test_a_veto_rejects_the_sample_whole():
    inputs = rollout_inputs(loss_mask=torch.ones(12, dtype=torch.bool))
    inputs.rollout_log_probs[9] = inputs.old_log_probs[9] + 8
    _, metrics, grad, _ = run(inputs, ObjectiveConfig(correction=CorrectionConfig(rs_veto_threshold=1e-3)))
    assert not grad[7:].any() and grad[:7].abs().min() > 0
    assert value(metrics, "rs_rejected") == pytest.approx(5 / 12)
    hidden = torch.ones(12, dtype=torch.bool)
    hidden[9] = False
    _, metrics, grad, _ = run(
        replace(inputs, loss_mask=hidden), ObjectiveConfig(correction=CorrectionConfig(rs_veto_threshold=1e-3))
    )
    assert value(metrics, "rs_rejected") == 0


def test_opsm_masks_sequences_of_negative_advantage_that_drifted():
    inputs = make_inputs(lengths=LENGTHS, loss_mask=torch.ones(12, dtype=torch.bool))
    advantages = torch.tensor([-1.0, -1.0, 1.0])[inputs.sample_index]
    drift = torch.tensor([0.2, 0.05, 0.2])[inputs.sample_index]
    old = inputs.log_probs.detach() + drift
    old[0] -= 0.05  # the mean decides, not the token
    inputs = replace(inputs, advantages=advantages, old_log_probs=old)
    config = ObjectiveConfig(correction=CorrectionConfig(use_opsm=True, opsm_delta=0.1))
    _, metrics, grad, _ = run(inputs, config)
    assert not grad[:4].any() and grad[4:].abs().min() > 0
    assert value(metrics, "opsm_clipfrac") == pytest.approx(4 / 12)
    everything = replace(config, correction=CorrectionConfig(use_opsm=True, opsm_delta=0.01))
    assert not run(inputs, everything)[2][:7].any()


def test_kl_loss_and_entropy_keep_what_the_policy_loss_rejects():
    inputs = rollout_inputs(loss_mask=torch.ones(12, dtype=torch.bool))
    rejecting = CorrectionConfig(rs_upper_bound=0.0)  # all with log-probs of the engine
    config = ObjectiveConfig(use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1, correction=rejecting)
    _, metrics, grad, entropy_grad = run(inputs, config)
    plain = run(inputs, replace(config, correction=CorrectionConfig()))
    assert value(metrics, "kl_loss") == value(plain[1], "kl_loss")
    assert torch.equal(entropy_grad, plain[3]) and grad[:4].abs().min() > 0
    assert value(metrics, "rs_rejected") == pytest.approx(9 / 12)


def test_rollout_log_probs_take_the_place_of_the_old_ones():
    inputs = rollout_inputs(loss_mask=torch.ones(12, dtype=torch.bool))
    rollout = inputs.old_log_probs + 0.1
    ours = run(replace(inputs, rollout_log_probs=rollout), ObjectiveConfig(use_rollout_logprobs=True))
    theirs = run(replace(inputs, old_log_probs=rollout, rollout_log_probs=None), ObjectiveConfig())
    assert ours[0] == theirs[0] and torch.equal(ours[2], theirs[2])
    assert value(ours[1], "ppo_kl") == value(theirs[1], "ppo_kl")
    # What is compared with the engine is the trainer, where it is known.
    assert value(ours[1], "train_rollout_logprob_abs_diff") == pytest.approx(0.1)
    unknown = replace(inputs, rollout_log_probs=rollout, trainer_known=False)
    metrics = CorrectionConfig(mismatch_metrics=True)
    found = run(unknown, ObjectiveConfig(use_rollout_logprobs=True, correction=metrics))[1]
    assert sorted(found) == ["entropy_loss", "loss", "pg_clipfrac", "pg_loss", "ppo_kl"]


def test_mismatch_metrics_are_their_formulas():
    inputs = rollout_inputs()
    _, metrics = objective(inputs, ObjectiveConfig(correction=CorrectionConfig(mismatch_metrics=True)))
    known = [(rows, r) for rows, r in samples(inputs) if not r.isnan().any()]
    tokens = torch.cat([r for _, r in known])
    weights = torch.tensor([len(r) for _, r in known], dtype=torch.float64)
    weights /= weights.sum()

    def of_samples(function):
        return sum(w * function(rows, r) for w, (rows, r) in zip(weights, known, strict=True)).item()

    old, rollout = inputs.old_log_probs, inputs.rollout_log_probs
    expected = {
        "mismatch_kl": -tokens.mean().item(),
        "mismatch_k3_kl": (tokens.exp() - 1 - tokens).mean().item(),
        "mismatch_ratio": tokens.exp().mean().item(),
        "mismatch_chi2_token": (tokens.exp() ** 2 - 1).mean().item(),
        "mismatch_chi2_sequence": of_samples(lambda _, r: r.sum().exp() ** 2 - 1),
        "mismatch_trainer_ppl": of_samples(lambda rows, _: (-old[rows].mean()).exp()),
        "mismatch_rollout_ppl": of_samples(lambda rows, _: (-rollout[rows].mean()).exp()),
        "mismatch_log_ppl_diff": of_samples(lambda _, r: -r.mean()),
    }
    found = {name: value(metrics, name) for name in metrics if name.startswith("mismatch")}
    assert found == pytest.approx(expected)


EVERYTHING = CorrectionConfig(
    use_tis=True,
    tis_level="geometric",
    tis_clip=1.2,
    rs_level="sequence",
    rs_lower_bound=0.5,
    rs_veto_threshold=1e-4,
    use_opsm=True,
    mismatch_metrics=True,
)


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("parts", [[[0], [1], [2]], [[2, 0], [1]], [[2, 1, 0]]])
def test_corrections_do_not_depend_on_micro_batches(loss, parts):
    inputs = rollout_inputs()
    inputs.loss_mask[4:7] = False
    config = ObjectiveConfig(policy_loss=loss, correction=EVERYTHING)
    whole, metrics, grad, _ = run(inputs, config)
    total, sums = 0.0, {}
    for rows in parts:
        part_loss, part_metrics = objective(split(inputs, rows), config)
        part_loss.backward()
        total += part_loss.item()
        for name, pair in part_metrics.items():
            sums[name] = [old + new for old, new in zip(sums.get(name, (0, 0)), pair, strict=True)]
    assert total == pytest.approx(whole)
    torch.testing.assert_close(inputs.log_probs.grad, grad)
    assert {n: value(sums, n) for n in sums if sums[n][1]} == pytest.approx(
        {n: value(metrics, n) for n in metrics if metrics[n][1]}
    )


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("gap", [100.0, -100.0, 3e4])
def test_huge_gaps_to_the_engine_leave_everything_finite(loss, level, gap):
    inputs = rollout_inputs(dtype=torch.float32)
    inputs = replace(inputs, rollout_log_probs=inputs.rollout_log_probs.float() + gap)
    correction = replace(EVERYTHING, tis_level=level, rs_level=level, rs_lower_bound=None, rs_veto_threshold=None)
    for rollout in (False, True):
        config = ObjectiveConfig(policy_loss=loss, use_rollout_logprobs=rollout, correction=correction)
        full = replace(inputs, rollout_log_probs=inputs.rollout_log_probs.nan_to_num(gap))
        total, metrics, grad, _ = run(full if rollout else inputs, config)
        assert math.isfinite(total) and grad.isfinite().all()
        assert all(part.isfinite() for pair in metrics.values() for part in pair)


@pytest.mark.parametrize("junk", [math.inf, -math.inf, 1e30, NAN])
def test_a_masked_position_influences_no_correction(junk):
    clean = rollout_inputs()
    config = ObjectiveConfig(correction=EVERYTHING)
    mask = clean.loss_mask
    dirty = {n: torch.where(mask, getattr(clean, n), junk) for n in ("old_log_probs", "rollout_log_probs")}
    ours, theirs = run(replace(clean, **dirty), config), run(clean, config)
    assert ours[0] == theirs[0] and ours[1] == theirs[1] and torch.equal(ours[2], theirs[2])


CHANGES = [
    ({"use_tis": True}, [{"tis_clip": 1.05}, {"tis_clip_low": 0.95}, {"tis_level": "sequence"}]),
    ({"use_tis": True}, [{"tis_level": "geometric"}, {"use_tis": False}, {"tis_mode": "mask", "tis_clip": 1.05}]),
    ({"use_tis": True, "tis_clip_low": 0.95}, [{"tis_mode": "truncate"}, {"tis_mode": "mask"}]),
    ({"rs_lower_bound": 0.8}, [{"rs_lower_bound": 0.99}, {"rs_level": "sequence"}, {"rs_level": "geometric"}]),
    ({"rs_lower_bound": 0.8}, [{"rs_upper_bound": 1.1}, {"rs_level": "geometric", "rs_veto_threshold": 0.5}]),
    ({"use_opsm": True, "opsm_delta": 0.0}, [{"opsm_delta": 3.0}, {"use_opsm": False}]),
]


@pytest.mark.parametrize(("base", "change"), [(base, change) for base, row in CHANGES for change in row], ids=str)
def test_every_option_of_a_correction_changes_the_loss(base, change):
    inputs = rollout_inputs(lengths=(9, 7, 30, 25, 20, 8))
    rewards = torch.tensor([-1.0, 0.7, -0.5, 0.3, 0.9, -0.2], dtype=torch.float64)[inputs.sample_index]
    inputs = replace(inputs, advantages=rewards)
    before = run(inputs, ObjectiveConfig(correction=CorrectionConfig(**base)))[0]
    after = run(inputs, ObjectiveConfig(correction=CorrectionConfig(**base | change)))[0]
    assert before != pytest.approx(after, rel=1e-6)


def test_wrong_names_and_missing_log_probs_are_errors():
    with pytest.raises(ValueError, match="unknown level 'word': it is one of token, sequence, geometric"):
        CorrectionConfig(tis_level="word")
    with pytest.raises(ValueError, match="unknown mode 'cut': it is one of clip, truncate, mask"):
        CorrectionConfig(tis_mode="cut")
    blank = torch.zeros(2)
    inputs = CorrectionInputs(blank, blank, None, blank, blank, torch.zeros(2, dtype=torch.int64), blank == 0, 1)
    with pytest.raises(ValueError, match="not known"):
        correct(inputs, CorrectionConfig(use_tis=True))
