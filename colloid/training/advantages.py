"""Advantages of a step's micro-batches, before the first of them is trained.

They need more than a micro-batch: whitening takes its moments from the step's global batch. Context-parallel ranks
see all response tokens of their samples, and data-parallel ones have no sample in common, so the sums over the
data-parallel ranks count each token once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from colloid.algorithms.advantages import AdvantageInputs, Advantages, Moments, compute_advantages, teacher_gap, whiten
from colloid.algorithms.estimators import get_estimator
from colloid.training.custom import custom_advantages
from colloid.training.micro_batch import MicroBatch

LogProbs = Sequence[torch.Tensor]
"""[R] of each micro-batch."""


@dataclass(frozen=True)
class AdvantageConfig:
    """Which advantages.

    Attributes:
        normalize: whiten them, also where the estimator does not do so by itself.
        kl_coef: of the penalty in the rewards; without effect where the estimator has none.
    """

    estimator: str = "grpo"
    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0
    normalize: bool = False
    custom: Callable[..., Any] | None = None
    """The user's, in place of the estimator's, with `args` bound; whitened where the options say so."""
    distills: bool = False
    """Whether a teacher's log-probs enter (on-policy distillation)."""
    distillation_coef: float = 0.0
    """What of (old - teacher) is subtracted from the advantages, whatever they are made of; before whitening."""

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of the reference enter."""
        return bool(self.kl_coef) and (self.custom is not None or get_estimator(self.estimator).kl_in_rewards)

    @property
    def needs_log_probs(self) -> bool:
        """Whether those of the behaviour policy enter."""
        return self.needs_reference or self.distills or self.custom is not None

    @property
    def whitens(self) -> bool:
        return self.normalize or get_estimator(self.estimator).always_whitens


def step_advantages(
    config: AdvantageConfig,
    micro_batches: Sequence[MicroBatch],
    *,
    old: LogProbs | None,
    reference: LogProbs | None,
    teacher: LogProbs | None = None,
    entropy: LogProbs | None = None,
    values: LogProbs | None = None,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """float64 [R] of each micro-batch of a step, 0 at masked tokens.

    Args:
        old: of the behaviour policy; needed where `config.needs_log_probs`, as `reference` is where
            `config.needs_reference`, and `teacher` where `config.distills`.
        entropy: of the behaviour policy, [R] of each micro-batch; for a function of the user's.
        values: the critic's, where the estimator needs them.
        sum_over_ranks: adds a tensor up over the data-parallel ranks. Called once where advantages are whitened.
    """
    if not micro_batches:
        return []
    if config.custom is not None:
        known = {"log_probs": old, "ref_log_probs": reference, "teacher_log_probs": teacher, "entropy": entropy}
        advantages = custom_advantages(config.custom, micro_batches, known)
        if config.distills:
            gaps = teacher_gaps(micro_batches, old, teacher)
            advantages = [one - config.distillation_coef * gap for one, gap in zip(advantages, gaps, strict=True)]
    else:
        found = _estimated(config, micro_batches, old, reference, teacher, values)
        advantages = [each.advantages for each in found]
    return whitened(advantages, micro_batches, sum_over_ranks) if config.whitens else advantages


def step_returns(
    config: AdvantageConfig,
    micro_batches: Sequence[MicroBatch],
    *,
    old: LogProbs | None,
    reference: LogProbs | None,
    values: LogProbs,
) -> list[torch.Tensor]:
    """float64 [R] of each micro-batch: what the critic's values are to become, 0 at masked tokens. Neither whitening
    nor a teacher enters.
    """
    config = replace(config, distillation_coef=0.0)
    return [each.returns for each in _estimated(config, micro_batches, old, reference, None, values)]


def teacher_gaps(
    micro_batches: Sequence[MicroBatch], old: LogProbs | None, teacher: LogProbs | None
) -> list[torch.Tensor]:
    """float64 [R] of each micro-batch, see `teacher_gap`; none without a teacher."""
    if not old or not teacher:
        return []
    rows = zip(old, teacher, micro_batches, strict=True)
    return [teacher_gap(one, other, micro_batch.loss_mask) for one, other, micro_batch in rows]


def _estimated(
    config: AdvantageConfig,
    micro_batches: Sequence[MicroBatch],
    old: LogProbs | None,
    reference: LogProbs | None,
    teacher: LogProbs | None,
    values: LogProbs | None,
) -> list[Advantages]:
    return [
        compute_advantages(
            config.estimator,
            AdvantageInputs(
                micro_batch.rewards,
                micro_batch.sample_index,
                micro_batch.loss_mask,
                old_log_probs=old[row] if old else None,
                ref_log_probs=reference[row] if reference else None,
                teacher_log_probs=teacher[row] if teacher else None,
                values=values[row] if values else None,
                kl_coef=config.kl_coef,
                distillation_coef=config.distillation_coef,
                gamma=config.gamma,
                lambd=config.lambd,
            ),
        )
        for row, micro_batch in enumerate(micro_batches)
    ]


def whitened(
    advantages: Sequence[torch.Tensor],
    micro_batches: Sequence[MicroBatch],
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """With the mean and variance of all unmasked tokens of all ranks; there is at least one micro-batch."""
    pairs = [(values, micro_batch.loss_mask) for values, micro_batch in zip(advantages, micro_batches, strict=True)]
    moments = Moments(sum_over_ranks(sum(Moments.of(*pair).sums for pair in pairs)))
    return [whiten(*pair, moments) for pair in pairs]
