"""Every estimator, policy loss and KL, and the critic's loss, against float64 values that verl 0.9.1 computed."""

import json
from pathlib import Path

import pytest
import torch

from colloid.algorithms.advantages import AdvantageInputs, Moments, compute_advantages, whiten
from colloid.algorithms.kl import kl_penalty
from colloid.algorithms.losses import POLICY_LOSSES, LossConfig, PolicyLossInputs
from colloid.algorithms.rewards import shape_rewards
from colloid.algorithms.values import value_loss

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "algorithm_vectors.json").read_text())
INPUTS, OUTPUTS = VECTORS["inputs"], VECTORS["outputs"]
LENGTHS = torch.tensor(INPUTS["lengths"])
SAMPLE_INDEX = torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS)


def packed(ragged):
    return torch.tensor([value for sample in ragged for value in sample], dtype=torch.float64)


MASK = packed(INPUTS["loss_mask"]).bool()


def assert_equal_where_unmasked(ours, ragged):
    torch.testing.assert_close(torch.where(MASK, ours, 0.0), torch.where(MASK, packed(ragged), 0.0), rtol=0, atol=1e-6)


def advantages_of(estimator, *, whitened, std_normalization=True, **fields):
    raw = torch.tensor(INPUTS["rewards"], dtype=torch.float64)
    rewards = shape_rewards(
        raw,
        torch.tensor(INPUTS["group"]),
        estimator,
        valid=torch.ones(len(raw), dtype=torch.bool),
        std_normalization=std_normalization,
    )
    result = compute_advantages(estimator, AdvantageInputs(rewards, SAMPLE_INDEX, MASK, **fields))
    advantages = result.advantages
    if whitened:
        advantages = whiten(advantages, MASK, Moments.of(advantages, MASK))
    return advantages, result.returns


ADVANTAGES = {
    "grpo": ("grpo", False, {}),
    "grpo_without_std": ("grpo", False, {"std_normalization": False}),
    "rloo": ("rloo", False, {}),
    "reinforce_plus_plus_gamma_0.9": ("reinforce_plus_plus", True, {"gamma": 0.9}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", True, {}),
}
"""Name -> (estimator, whether it whitens, options)."""
GAE = "gae_gamma_0.99_lambda_0.95"


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_the_reference(name):
    estimator, whitened, options = ADVANTAGES[name]
    advantages, returns = advantages_of(estimator, whitened=whitened, **options)
    assert_equal_where_unmasked(advantages, OUTPUTS[name]["advantages"])
    if estimator == "reinforce_plus_plus_baseline":  # whose reference calls the whitened advantages returns
        returns = advantages
    assert_equal_where_unmasked(returns, OUTPUTS[name]["returns"])


def test_gae_equals_the_reference():
    reference = OUTPUTS[GAE]
    advantages, returns = advantages_of("ppo", whitened=True, values=packed(INPUTS["values"]), gamma=0.99, lambd=0.95)
    assert_equal_where_unmasked(advantages, reference["whitened_advantages"])
    assert_equal_where_unmasked(returns, reference["returns"])


def token_weights(aggregation):
    if aggregation == "per_token":
        return torch.ones(len(MASK), dtype=torch.float64) / MASK.sum()
    counts = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, SAMPLE_INDEX, MASK.double())
    return (1 / counts / len(LENGTHS))[SAMPLE_INDEX]


CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.28}


LOSSES = {
    "ppo_clip_low_0.2_high_0.28_per_token": ("ppo", CLIP),
    "ppo_clip_low_0.2_high_0.28_per_sample": ("ppo", CLIP),
    "ppo_dual_clip_c_1.2_per_token": ("ppo", {**CLIP, "eps_clip_c": 1.2}),
    "ppo_dual_clip_c_1.2_per_sample": ("ppo", {**CLIP, "eps_clip_c": 1.2}),
    "cispo_low_0.2_high_0.28_per_token": ("cispo", CLIP),
    "cispo_low_0.2_high_0.28_per_sample": ("cispo", CLIP),
    "gspo_low_0.003_high_0.004_per_sample": ("gspo", {"eps_clip": 0.003, "eps_clip_high": 0.004}),
    "gmpo_low_0.4_high_0.4_per_sample": ("gmpo", {"eps_clip": 0.4}),
    "sapo_tau_pos_1.0_tau_neg_1.05_per_sample": ("sapo", {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_and_their_gradients_equal_the_reference(name):
    loss, config = LOSSES[name]
    log_probs = packed(INPUTS["log_probs"]).requires_grad_()
    if loss in ("gspo", "gmpo"):
        advantages = torch.tensor(INPUTS["sequence_advantages"], dtype=torch.float64)[SAMPLE_INDEX]
    else:
        advantages = packed(INPUTS["advantages"])
    inputs = PolicyLossInputs(log_probs, packed(INPUTS["old_log_probs"]), advantages, SAMPLE_INDEX, MASK, len(LENGTHS))
    per_token = POLICY_LOSSES[loss](inputs, LossConfig(**config)).loss
    weights = token_weights("per_token" if name.endswith("per_token") else "per_sample")
    total = (weights * torch.where(MASK, per_token, 0.0)).sum()
    total.backward()
    assert total.item() == pytest.approx(OUTPUTS[name]["loss"], abs=1e-6)
    assert_equal_where_unmasked(log_probs.grad, OUTPUTS[name]["grad_log_probs"])
    assert not log_probs.grad[~MASK].any()


KL = {"kl_k1": "k1", "kl_k2": "k2", "kl_low_var_kl": "low_var_kl"}


@pytest.mark.parametrize("kind", KL.values())
def test_kl_estimates_equal_the_reference(kind):
    penalty = kl_penalty(packed(INPUTS["log_probs"]), packed(INPUTS["ref_log_probs"]), kind)
    torch.testing.assert_close(penalty, packed(OUTPUTS[f"kl_{kind}"]["per_token"]), rtol=0, atol=1e-6)


VALUE_LOSS = "value_loss_clip_0.2_per_token"


def test_the_critics_loss_and_its_gradient_are_twice_the_reference():
    """The reference has a factor 1/2 that ours has not, see its note."""
    values = packed(INPUTS["new_values"]).requires_grad_()
    loss, _ = value_loss(
        *(values, packed(INPUTS["values"]), packed(INPUTS["value_returns"])),
        clip=0.2,
        loss_mask=MASK,
        token_weights=token_weights("per_token"),
        share=1.0,
    )
    loss.backward()
    assert loss.item() / 2 == pytest.approx(OUTPUTS[VALUE_LOSS]["loss"], abs=1e-6)
    assert_equal_where_unmasked(values.grad / 2, OUTPUTS[VALUE_LOSS]["grad_values"])
    assert not values.grad[~MASK].any()


def test_nothing_of_the_reference_is_left_out():
    assert {*ADVANTAGES, GAE, *LOSSES, *KL, VALUE_LOSS} == OUTPUTS.keys()
    compared = {"advantages", "returns", "whitened_advantages", "loss", "grad_log_probs", "grad_values", "per_token"}
    assert {name for output in OUTPUTS.values() for name in output} == compared | {"note"}
