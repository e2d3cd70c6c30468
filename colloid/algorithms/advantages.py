"""Advantages and returns of response tokens, and their whitening.

Masked tokens (tool output) are skipped in every recursion, as if they were not there: it runs over the unmasked
tokens alone, and their results are put back in place. Masked positions get 0.

R response tokens of B samples, packed (see `segments.py`). Computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from colloid.algorithms.estimators import Credit, Estimator, get_estimator
from colloid.algorithms.segments import discounted_sums, last_of_segment, masked

WHITENING_EPSILON = 1e-8


@dataclass(frozen=True)
class AdvantageInputs:
    """What advantages are computed from; log-probs at the sampling temperature."""

    rewards: Tensor
    """[B], shaped by `rewards.shape_rewards`."""
    sample_index: Tensor
    """int64 [R]."""
    loss_mask: Tensor
    """bool [R]."""
    old_log_probs: Tensor | None = None
    """[R]; needed where `kl_coef` or `distillation_coef` is not 0."""
    ref_log_probs: Tensor | None = None
    """[R]; needed where `kl_coef` is not 0."""
    teacher_log_probs: Tensor | None = None
    """[R]; needed where `distillation_coef` is not 0."""
    values: Tensor | None = None
    """[R], the critic's; needed for GAE."""
    kl_coef: float = 0.0
    distillation_coef: float = 0.0
    """Of on-policy distillation: its multiple of (old - teacher) is subtracted from the advantages."""
    gamma: float = 1.0
    lambd: float = 1.0


@dataclass(frozen=True)
class Advantages:
    """float64 [R] each, 0 at masked tokens."""

    advantages: Tensor
    returns: Tensor


def compute_advantages(estimator: str, inputs: AdvantageInputs) -> Advantages:
    """The estimator's advantages, before whitening.

    Raises:
        ValueError: the estimator is unknown, or an input that it needs is missing.
    """
    entry = get_estimator(estimator)
    kept = inputs.loss_mask.nonzero().squeeze(-1)
    segments = inputs.sample_index[kept]
    advantages, returns = _of_unmasked(entry, inputs, kept, segments)
    if inputs.distillation_coef:
        old, teacher = _needed(inputs.old_log_probs, "old_log_probs"), _needed(inputs.teacher_log_probs, "teacher")
        advantages = advantages - inputs.distillation_coef * teacher_gap(old, teacher, inputs.loss_mask)[kept]
    blank = inputs.rewards.new_zeros(len(inputs.loss_mask), dtype=torch.float64)
    return Advantages(blank.index_copy(0, kept, advantages), blank.index_copy(0, kept, returns))


def teacher_gap(old_log_probs: Tensor, teacher_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """float64 [R]: old - teacher, 0 at masked tokens. Its mean over the policy's own tokens estimates the KL to the
    teacher (on-policy distillation).
    """
    return masked(old_log_probs.to(torch.float64) - teacher_log_probs.to(torch.float64), loss_mask)


def _of_unmasked(entry: Estimator, inputs: AdvantageInputs, kept: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    rewards = inputs.rewards.to(torch.float64)[segments]
    if entry.credit is not Credit.BROADCAST:
        rewards = masked(rewards, last_of_segment(segments))
    if entry.kl_in_rewards and inputs.kl_coef:
        old = _needed(inputs.old_log_probs, "old_log_probs")[kept].to(torch.float64)
        rewards = rewards - inputs.kl_coef * (old - _needed(inputs.ref_log_probs, "ref_log_probs")[kept])
    if entry.credit is Credit.BROADCAST:
        return rewards, rewards
    if entry.credit is Credit.RETURNS:
        returns = discounted_sums(rewards, segments, inputs.gamma)
        return returns, returns
    values = _needed(inputs.values, "values")[kept].to(torch.float64)
    next_values = torch.zeros_like(values)
    next_values[:-1] = values[1:]
    next_values = masked(next_values, ~last_of_segment(segments))
    errors = rewards + inputs.gamma * next_values - values
    advantages = discounted_sums(errors, segments, inputs.gamma * inputs.lambd)
    return advantages, advantages + values


def _needed(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"the advantages need {name}")
    return values


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of unmasked values: add them over ranks, then take mean and variance."""

    sums: Tensor
    """float64 [3]; all-reduce (sum) this over the ranks of the step's global batch."""

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Of `values` [R] where `mask`."""
        kept = masked(values.to(torch.float64), mask)
        return cls(torch.stack([mask.sum(dtype=torch.float64), kept.sum(), (kept**2).sum()]))

    @property
    def mean(self) -> Tensor:
        """Scalar; 0 of nothing."""
        return self.sums[1] / self.sums[0].clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """Scalar, unbiased; 0 of fewer than two values."""
        count, total, squares = self.sums
        return ((squares - total**2 / count.clamp(min=1)) / (count - 1).clamp(min=1)).clamp(min=0)


def whiten(values: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) where `mask`, else 0; the moments are those of the global batch."""
    return masked((values - moments.mean) / (moments.variance + WHITENING_EPSILON).sqrt(), mask)
