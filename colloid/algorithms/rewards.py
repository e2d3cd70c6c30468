"""Reward shaping: what a sample's reward is worth beside those of its group (the samples of one prompt)."""

from __future__ import annotations

import torch
from torch import Tensor

from colloid.algorithms.estimators import Baseline, get_estimator
from colloid.algorithms.segments import masked, segment_sum

EQUAL_REWARDS_TOLERANCE = 1e-6
"""Rewards of a group that lie this close together are equal."""
STD_EPSILON = 1e-6


def shape_rewards(
    raw: Tensor,
    group_ids: Tensor,
    estimator: str,
    *,
    valid: Tensor,
    std_normalization: bool = True,
    normalize: bool = True,
    rollout_ids: Tensor | None = None,
) -> Tensor:
    """The rewards that advantages are made from.

    A group whose rewards are all equal, or that has one valid sample, gets exactly 0.

    Args:
        raw: float64 [B].
        group_ids: int64 [B]. Groups may be uneven, and need not be adjacent.
        valid: bool [B]. A sample that is not (FAILED) has no vote, and gets 0; its raw reward may be NaN.
        std_normalization: False: estimators that divide by the group's standard deviation do not (Dr.GRPO,
            arXiv:2503.20783).
        normalize: False: the raw rewards, with 0 for samples that are not valid.
        rollout_ids: int64 [B]. The valid samples that one rollout was split into have one vote together. None: each
            sample is a rollout.

    Returns:
        float64 [B].

    Raises:
        ValueError: the estimator is unknown, or a valid reward is not finite.
    """
    entry = get_estimator(estimator)
    rewards = masked(raw.to(torch.float64), valid)
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is not finite")
    if not normalize or entry.baseline is Baseline.NONE or not len(rewards):
        return rewards
    groups, num_groups = _number_groups(group_ids)
    votes = _votes(valid, rollout_ids)
    counts = segment_sum(votes, groups, num_groups)
    means = segment_sum(rewards * votes, groups, num_groups) / counts.clamp(min=1)
    deviations = masked(rewards - means[groups], valid)
    if entry.baseline is Baseline.LEAVE_ONE_OUT:
        # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        deviations = deviations * (counts / (counts - 1).clamp(min=1))[groups]
    elif entry.divides_by_std and std_normalization:
        variances = segment_sum(deviations**2 * votes, groups, num_groups) / (counts - 1).clamp(min=1)
        deviations = deviations / (variances.sqrt() + STD_EPSILON)[groups]
    return masked(deviations, (_spread(rewards, valid, groups, num_groups) > EQUAL_REWARDS_TOLERANCE)[groups])


def _votes(valid: Tensor, rollout_ids: Tensor | None) -> Tensor:
    """float64 [B]: those of a rollout add up to 1; 0 where a sample is not valid."""
    votes = valid.to(torch.float64)
    if rollout_ids is None:
        return votes
    rollouts, num_rollouts = _number_groups(rollout_ids)
    return votes / segment_sum(votes, rollouts, num_rollouts).clamp(min=1)[rollouts]


def _number_groups(group_ids: Tensor) -> tuple[Tensor, int]:
    unique, groups = torch.unique(group_ids, return_inverse=True)
    return groups, len(unique)


def _spread(rewards: Tensor, valid: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """[G]: largest minus smallest valid reward; negative where there is none."""
    extremes = rewards.new_full((num_groups,), torch.inf)
    smallest = extremes.scatter_reduce(0, groups, masked(rewards, valid, torch.inf), "amin")
    largest = (-extremes).scatter_reduce(0, groups, masked(rewards, valid, -torch.inf), "amax")
    return largest - smallest
