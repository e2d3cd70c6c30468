"""Advantages of a step's micro-batches: whitening over the whole global batch, KL in the rewards, who needs what."""

import numpy as np
import pytest
import torch

from colloid.algorithms.advantages import AdvantageInputs, compute_advantages
from colloid.algorithms.estimators import ESTIMATORS
from colloid.config import parse
from colloid.rollout.batching import has_gradient
from colloid.training.advantages import AdvantageConfig, step_advantages
from colloid.training.loss_options import advantage_config, objective_config
from colloid.training.micro_batch import make_micro_batch
from tests.parallel.rollouts import make_rollout

BATCH = make_rollout()
NAMES = [name for name in ESTIMATORS if name != "ppo"]
SPLITS = {
    "one": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "pairs": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "mixed": [[5], [7, 0, 2], [3, 6], [4, 1]],
}


def log_probs(seed):
    """float64 [R] for the whole batch."""
    return -torch.rand(len(BATCH.loss_mask), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def advantages_of(config, rows, sum_over_ranks=lambda sums: sums):
    """[R] in the order of the batch, 0 where no micro-batch has the sample."""
    micro_batches = [make_micro_batch(BATCH, np.asarray(part)) for part in rows]
    old, ref = ([log_probs(seed)[part.response_index] for part in micro_batches] for seed in (1, 2))
    found = step_advantages(config, micro_batches, old=old, reference=ref, sum_over_ranks=sum_over_ranks)
    whole = torch.zeros(len(BATCH.loss_mask), dtype=torch.float64)
    for part, values in zip(micro_batches, found, strict=True):
        whole[part.response_index] = values
    return whole


def expected_of(config):
    """By the formulas, from the batch as one pack."""
    mask = torch.from_numpy(BATCH.loss_mask.astype(bool))
    index = torch.repeat_interleave(torch.arange(8), torch.from_numpy(BATCH.response_lengths))
    rewards = torch.from_numpy(BATCH.rewards)
    inputs = AdvantageInputs(
        rewards, index, mask, log_probs(1), log_probs(2), kl_coef=config.kl_coef, gamma=config.gamma
    )
    plain = compute_advantages(config.estimator, inputs).advantages
    if not config.whitens:
        return plain
    kept = plain[mask]
    return torch.where(mask, (plain - kept.mean()) / (kept.var() + 1e-8).sqrt(), 0.0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("estimator", NAMES)
def test_advantages_do_not_depend_on_micro_batches(estimator, split, normalize):
    config = AdvantageConfig(estimator, gamma=0.9, kl_coef=0.1, normalize=normalize)
    torch.testing.assert_close(advantages_of(config, SPLITS[split]), expected_of(config))


def test_moments_are_those_of_all_ranks():
    config = AdvantageConfig("reinforce_plus_plus", gamma=0.9)
    sums = []
    advantages_of(config, SPLITS["pairs"][2:], lambda own: sums.append(own) or own)
    ours = advantages_of(config, SPLITS["pairs"][:2], lambda own: own + sums[0])
    torch.testing.assert_close(ours[ours != 0], expected_of(config)[ours != 0])
    alone = advantages_of(config, SPLITS["pairs"][:2])
    assert not torch.allclose(alone, ours)


def test_a_step_without_micro_batches_sums_nothing():
    def fail(sums):
        raise AssertionError("the ranks would wait for each other")

    config = AdvantageConfig("reinforce_plus_plus")
    assert step_advantages(config, [], old=None, reference=None, sum_over_ranks=fail) == []


@pytest.mark.parametrize("estimator", NAMES)
def test_the_reference_is_needed_where_its_kl_is_in_the_rewards(estimator):
    assert AdvantageConfig(estimator, kl_coef=0.1).needs_reference == estimator.startswith("reinforce_plus_plus")
    assert not AdvantageConfig(estimator).needs_reference


def plan(text):
    return parse(["--dry-run", "--device", "cpu", "--num-layers", "1", "--hidden-size", "8", *text.split()])


@pytest.mark.parametrize(
    ("options", "all_unmasked"),
    [
        ("", False),
        ("--advantage-estimator rloo", False),
        ("--advantage-estimator gspo", False),
        ("--advantage-estimator cispo", False),
        ("--policy-loss sapo", False),
        ("--kl-coef 0.1", False),
        ("--normalize-advantages", True),
        ("--advantage-estimator reinforce_plus_plus", True),
        ("--advantage-estimator reinforce_plus_plus_baseline", True),
        ("--use-kl-loss --kl-loss-coef 0.1", True),
        ("--entropy-coef 0.1", True),
    ],
)
def test_samples_without_a_gradient_are_left_out_only_where_the_reward_alone_decides(options, all_unmasked):
    found = has_gradient(plan(options), BATCH)
    unmasked = BATCH.loss_weights > 0
    assert not unmasked[5]  # removed
    assert found.tolist() == (unmasked if all_unmasked else unmasked & (BATCH.rewards != 0)).tolist()


def test_options_reach_the_records():
    args = plan(
        "--advantage-estimator reinforce_plus_plus --gamma 0.9 --kl-coef 0.2 --normalize-advantages --policy-loss sapo "
        "--sapo-tau-pos 0.7 --sapo-tau-neg 0.8"
    )
    assert advantage_config(args) == AdvantageConfig("reinforce_plus_plus", 0.9, 1.0, 0.2, True)
    objective = objective_config(args)
    assert (objective.policy_loss, objective.sapo_tau_pos, objective.sapo_tau_neg) == ("sapo", 0.7, 0.8)
    assert objective_config(plan("--advantage-estimator gspo")).policy_loss == "gspo"
    assert objective_config(plan("--advantage-estimator cispo")).policy_loss == "cispo"


@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("custom", [False, True])
def test_a_teacher_is_subtracted_from_any_advantage(custom, split):
    micro_batches = [make_micro_batch(BATCH, np.asarray(part)) for part in SPLITS[split]]
    old, teacher = ([log_probs(seed)[part.response_index] for part in micro_batches] for seed in (1, 2))

    def ones(data):
        data["advantages"] = [torch.ones_like(values) for values in data["log_probs"]]
        data["returns"] = data["advantages"]

    plain = AdvantageConfig(custom=ones if custom else None)
    config = AdvantageConfig(custom=plain.custom, distills=True, distillation_coef=0.3)
    assert config.needs_log_probs and not config.needs_reference
    options = {"old": old, "reference": None, "sum_over_ranks": lambda sums: sums}
    before = step_advantages(plain, micro_batches, **options)
    after = step_advantages(config, micro_batches, teacher=teacher, **options)
    for row, part in enumerate(micro_batches):
        gap = torch.where(part.loss_mask, old[row] - teacher[row], 0.0)
        assert torch.allclose(after[row], before[row] - 0.3 * gap, rtol=0, atol=1e-6)
