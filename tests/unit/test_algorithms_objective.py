import math
from dataclasses import replace

import pytest
import torch

from colloid.algorithms.estimators import ESTIMATORS
from colloid.algorithms.kl import KL_KINDS, kl_penalty
from colloid.algorithms.losses import POLICY_LOSSES
from colloid.algorithms.objective import ObjectiveConfig, ObjectiveInputs, objective

INF, NAN = float("inf"), float("nan")
EVERYTHING = ObjectiveConfig(use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1, eps_clip=0.2, eps_clip_high=0.28)


def make_inputs(lengths=(4, 3, 5), seed=0, dtype=torch.float64, **fields):
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)

    def noise(scale):
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old = -noise(1.0).abs()
    values = {
        "log_probs": (old + noise(0.3)).to(dtype).requires_grad_(),
        "old_log_probs": old.to(dtype),
        "ref_log_probs": (old + noise(0.3)).to(dtype),
        "rollout_log_probs": (old + noise(0.01)).to(dtype),
        "advantages": noise(1.0),
        "entropy": (noise(1.0).abs()).to(dtype).requires_grad_(),
        "sample_index": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        "loss_mask": torch.rand(count, generator=generator) < 0.7,
        "token_weights": torch.full((count,), 1 / count, dtype=torch.float64),
        "num_samples": len(lengths),
        **fields,
    }
    return ObjectiveInputs(**values)


def value(metrics, name):
    total, weight = metrics[name]
    return (total / weight).item()


def run(inputs, config):
    """Loss, metrics, and the gradients of log-probs and entropy."""
    loss, metrics = objective(inputs, config)
    leaves = [inputs.log_probs, inputs.entropy]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.item(), metrics, *grads


def test_the_total_is_policy_minus_entropy_plus_kl_by_a_formula_for_each_token():
    inputs = make_inputs()
    loss, metrics, grad, entropy_grad = run(inputs, EVERYTHING)
    entropy = inputs.entropy.detach()
    expected, kl_sum, pg_sum, entropy_sum, count = 0.0, 0.0, 0.0, 0.0, len(inputs.loss_mask)
    for t in range(count):
        if not inputs.loss_mask[t]:
            continue
        lp, old, ref = (float(x.detach()[t]) for x in (inputs.log_probs, inputs.old_log_probs, inputs.ref_log_probs))
        advantage, ratio = float(inputs.advantages[t]), math.exp(lp - old)
        policy = max(-ratio * advantage, -min(max(ratio, 0.8), 1.28) * advantage)
        kl = math.exp(ref - lp) - 1 + lp - ref
        pg_sum, kl_sum, entropy_sum = pg_sum + policy, kl_sum + kl, entropy_sum + float(entropy[t])
        expected += (policy + 0.3 * kl - 0.1 * float(entropy[t])) / count
    assert loss == pytest.approx(expected, rel=1e-12)
    unmasked = int(inputs.loss_mask.sum())
    assert value(metrics, "loss") == pytest.approx(expected * count / unmasked)
    assert value(metrics, "pg_loss") == pytest.approx(pg_sum / unmasked)
    assert value(metrics, "kl_loss") == pytest.approx(kl_sum / unmasked)
    assert value(metrics, "entropy_loss") == pytest.approx(entropy_sum / unmasked)
    kept = inputs.loss_mask
    assert value(metrics, "ppo_kl") == pytest.approx((inputs.old_log_probs - inputs.log_probs)[kept].mean().item())
    difference = (inputs.old_log_probs - inputs.rollout_log_probs)[kept].abs().mean().item()
    assert value(metrics, "train_rollout_logprob_abs_diff") == pytest.approx(difference)
    assert 0 < value(metrics, "pg_clipfrac") < 1
    assert entropy_grad.tolist() == pytest.approx([-0.1 / count if keep else 0.0 for keep in kept])
    assert grad[kept].abs().min() > 0


@pytest.mark.parametrize("kind", list(KL_KINDS))
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_losses_and_gradients_equal_their_formulas(kind, unbiased):
    inputs = make_inputs()
    config = ObjectiveConfig(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, use_unbiased_kl=unbiased)
    _, metrics, with_kl, _ = run(replace(inputs, advantages=torch.zeros(12)), config)
    lp = inputs.log_probs.detach().requires_grad_()
    k = lp - inputs.ref_log_probs
    estimate = {"k1": k, "k2": k * k / 2}.get(kind, torch.exp(-k) - 1 + k)
    if unbiased:
        estimate = estimate * torch.exp(lp - inputs.old_log_probs)
    total = estimate[inputs.loss_mask].sum() / len(lp)
    total.backward()
    assert metrics["kl_loss"][0].item() == pytest.approx(total.item())
    torch.testing.assert_close(with_kl, lp.grad)


def test_low_var_kl_is_k3_clamped_after_the_ratio():
    k = torch.tensor([-3.0, 0.1, 15.0, -15.0], dtype=torch.float64)
    k3 = kl_penalty(k, torch.zeros(4), "k3")
    assert torch.equal(kl_penalty(k, torch.zeros(4), "low_var_kl"), k3.clamp(-10, 10))
    ratio = torch.tensor([0.1, 100.0, 0.1, 1e-7], dtype=torch.float64)
    unbiased = kl_penalty(k, torch.zeros(4), "low_var_kl", ratio=ratio)
    assert torch.equal(unbiased, (k3 * ratio).clamp(-10, 10))
    assert unbiased[0] > 1 and unbiased[2] < 10


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("kind", list(KL_KINDS))
@pytest.mark.parametrize("gap", [100.0, -100.0, 3e4])
def test_huge_log_ratios_leave_loss_and_gradient_finite(loss, kind, gap):
    inputs = make_inputs(dtype=torch.float32)
    inputs = replace(inputs, old_log_probs=inputs.old_log_probs + gap, ref_log_probs=inputs.ref_log_probs + gap)
    for unbiased in (False, True):
        config = replace(EVERYTHING, policy_loss=loss, kl_loss_type=kind, use_unbiased_kl=unbiased)
        total, metrics, grad, _ = run(inputs, config)
        assert math.isfinite(total) and grad.isfinite().all()
        assert all(part.isfinite() for pair in metrics.values() for part in pair)


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("junk", [INF, -INF, NAN, 1e30])
def test_a_masked_position_influences_nothing(loss, junk):
    clean = make_inputs()
    config = replace(EVERYTHING, policy_loss=loss, use_unbiased_kl=True)
    loss_clean, metrics_clean, grad_clean, entropy_grad_clean = run(clean, config)
    mask = clean.loss_mask
    names = (
        "log_probs",
        "old_log_probs",
        "ref_log_probs",
        "rollout_log_probs",
        "advantages",
        "entropy",
        "token_weights",
    )
    dirty = {name: torch.where(mask, getattr(clean, name).detach(), junk) for name in names}
    for name in ("log_probs", "entropy"):
        dirty[name].requires_grad_()
    loss_dirty, metrics_dirty, grad, entropy_grad = run(replace(clean, **dirty), config)
    assert loss_dirty == loss_clean and metrics_dirty == metrics_clean
    assert torch.equal(grad, grad_clean) and torch.equal(entropy_grad, entropy_grad_clean)
    assert not grad[~mask].any()


def split(inputs, samples):
    """The micro-batch of these samples, in this order."""
    rows = torch.cat([(inputs.sample_index == sample).nonzero().squeeze(-1) for sample in samples])
    lengths = torch.tensor([int((inputs.sample_index == sample).sum()) for sample in samples])
    names = [n for n, v in vars(inputs).items() if isinstance(v, torch.Tensor)]
    fields = {name: getattr(inputs, name)[rows] for name in names}
    fields["sample_index"] = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return replace(inputs, **fields, num_samples=len(samples))


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[2, 0], [3, 1]], [[3, 2, 1, 0]]])
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches(loss, parts):
    inputs = make_inputs(
        lengths=(4, 3, 5, 2), token_weights=torch.rand(4).double().repeat_interleave(torch.tensor([4, 3, 5, 2]))
    )
    inputs.loss_mask[4:7] = False  # a fully masked sample
    config = replace(EVERYTHING, policy_loss=loss)
    whole, metrics, grad, _ = run(inputs, config)
    total, sums = 0.0, {}
    for samples in parts:
        part_loss, part_metrics = objective(split(inputs, samples), config)
        part_loss.backward()
        total += part_loss.item()
        for name, pair in part_metrics.items():
            sums[name] = [old + new for old, new in zip(sums.get(name, (0, 0)), pair, strict=True)]
    assert total == pytest.approx(whole)
    torch.testing.assert_close(inputs.log_probs.grad, grad)
    assert {name: value(sums, name) for name in sums} == pytest.approx({name: value(metrics, name) for name in metrics})


def test_with_a_share_terms_of_the_loss_keep_the_steps_denominators():
    inputs = make_inputs()
    inputs.loss_mask[4:7] = False  # of three rollouts one is masked, and counts as one with loss 0
    weights = 1 / 3 / torch.tensor([max(1, int(inputs.loss_mask[inputs.sample_index == s].sum())) for s in range(3)])
    inputs = replace(inputs, token_weights=weights.double()[inputs.sample_index])
    total, metrics, _, _ = run(replace(inputs, share=1.0), EVERYTHING)
    assert value(metrics, "loss") == pytest.approx(total)
    terms = [value(metrics, name) for name in ("pg_loss", "kl_loss", "entropy_loss")]
    assert terms[0] + 0.3 * terms[1] - 0.1 * terms[2] == pytest.approx(total)
    halves = [objective(split(replace(inputs, share=0.5), samples), EVERYTHING)[1] for samples in ([0], [1, 2])]
    assert sum(half["loss"][0] for half in halves) / sum(half["loss"][1] for half in halves) == pytest.approx(total)


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
def test_one_step_without_old_log_probs_has_ratio_one(loss):
    inputs = make_inputs()
    config = ObjectiveConfig(policy_loss=loss)
    implicit = run(replace(inputs, old_log_probs=None), config)
    explicit = run(replace(inputs, old_log_probs=inputs.log_probs.detach()), config)
    assert implicit[0] == explicit[0] and torch.equal(implicit[2], explicit[2])
    assert value(implicit[1], "ppo_kl") == 0.0
    assert "pg_clipfrac" not in implicit[1] or value(implicit[1], "pg_clipfrac") == 0.0


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "gmpo"])
def test_on_policy_the_gradient_is_that_of_reinforce(loss):
    """With one advantage a sample, as group baselines give: weight times -A at every unmasked token."""
    inputs = make_inputs()
    inputs = replace(inputs, old_log_probs=None, advantages=torch.tensor([1.5, -0.5, 0.25])[inputs.sample_index])
    grad = run(inputs, ObjectiveConfig(policy_loss=loss))[2]
    torch.testing.assert_close(grad, torch.where(inputs.loss_mask, -inputs.advantages / 12, 0.0).double())


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    inputs = make_inputs(lengths=(2,), loss_mask=torch.tensor([True, True]), advantages=torch.tensor([-1.0, 1.0]))
    inputs = replace(inputs, old_log_probs=inputs.log_probs.detach() - 3, token_weights=torch.ones(2))
    free = run(inputs, ObjectiveConfig())
    dual = run(inputs, ObjectiveConfig(eps_clip_c=3.0))
    assert free[0] == pytest.approx(math.exp(3) - 1.2) and dual[0] == pytest.approx(3.0 - 1.2)
    assert free[2][0] > 0 and dual[2][0] == 0


def config_changes():
    yield from [{"eps_clip": 0.05}, {"eps_clip_high": 0.05}, {"eps_clip_c": 1.05}, {"entropy_coef": 0.5}]
    yield from [{"kl_loss_coef": 0.7}, {"use_unbiased_kl": True}, {"use_kl_loss": False}]
    yield from [{"kl_loss_type": kind} for kind in ("k1", "k2")]
    yield from [{"policy_loss": loss} for loss in ("gspo", "cispo", "gmpo", "sapo")]


@pytest.mark.parametrize("change", list(config_changes()), ids=str)
def test_every_option_of_the_loss_changes_the_loss(change):
    inputs = make_inputs(lengths=(10, 20, 30))
    assert run(inputs, EVERYTHING)[0] != pytest.approx(run(inputs, replace(EVERYTHING, **change))[0], rel=1e-6)


@pytest.mark.parametrize("change", [{"sapo_tau_pos": 1.5}, {"sapo_tau_neg": 1.5}], ids=str)
def test_every_option_of_sapo_changes_its_loss(change):
    inputs, config = make_inputs(), ObjectiveConfig(policy_loss="sapo")
    assert run(inputs, config)[0] != pytest.approx(run(inputs, replace(config, **change))[0], rel=1e-6)


def test_what_was_not_measured_is_no_metric():
    inputs = make_inputs(ref_log_probs=None, rollout_log_probs=None, entropy=None)
    loss, metrics = objective(inputs, ObjectiveConfig())
    assert sorted(metrics) == ["loss", "pg_clipfrac", "pg_loss", "ppo_kl"]
    assert not any(part.requires_grad for pair in metrics.values() for part in pair)


def test_samples_without_rollout_log_probs_are_left_out_of_the_difference():
    inputs = make_inputs(loss_mask=torch.ones(12, dtype=torch.bool))
    rollout = inputs.rollout_log_probs.clone()
    rollout[4:7] = NAN
    _, metrics = objective(replace(inputs, rollout_log_probs=rollout), ObjectiveConfig())
    known = ~rollout.isnan()
    expected = (inputs.old_log_probs - rollout)[known].abs().mean().item()
    assert value(metrics, "train_rollout_logprob_abs_diff") == pytest.approx(expected)
    nowhere = objective(replace(inputs, rollout_log_probs=torch.full((12,), NAN)), ObjectiveConfig())[1]
    assert nowhere["train_rollout_logprob_abs_diff"][1] == 0


def test_a_micro_batch_that_is_all_masked_has_loss_and_gradient_zero():
    inputs = make_inputs(loss_mask=torch.zeros(12, dtype=torch.bool))
    loss, _, grad, _ = run(inputs, EVERYTHING)
    assert loss == 0 and not grad.any()


def test_missing_inputs_and_wrong_options_are_errors():
    with pytest.raises(ValueError, match="--use-kl-loss needs reference log-probs"):
        objective(make_inputs(ref_log_probs=None), EVERYTHING)
    with pytest.raises(ValueError, match="--entropy-coef needs the entropy"):
        objective(make_inputs(entropy=None), EVERYTHING)
    for change, message in [
        ({"policy_loss": "ppo3"}, "unknown policy loss 'ppo3': it is one of ppo"),
        ({"kl_loss_type": "k4"}, "unknown --kl-loss-type 'k4': it is one of k1"),
        ({"eps_clip": -0.1}, "not negative"),
        ({"eps_clip_c": 0.5}, "--eps-clip-c is 0.5; it is above 1"),
        ({"use_kl_loss": False, "use_unbiased_kl": True}, "add --use-kl-loss"),
    ]:
        with pytest.raises(ValueError, match=message):
            replace(EVERYTHING, **change)


def test_every_estimator_implies_a_policy_loss_that_exists():
    assert {entry.policy_loss for entry in ESTIMATORS.values()} <= set(POLICY_LOSSES)
