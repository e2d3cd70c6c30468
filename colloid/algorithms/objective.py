"""The objective of a micro-batch: the one call site of policy loss, its corrections, KL loss and entropy.

total = sum over tokens of weight * where(mask, correction * policy - entropy_coef * H + kl_loss_coef * KL, 0)

The token weights hold the denominators of the step's global batch, so that micro-batches and ranks just add up:
neither the gradient nor a metric depends on how the batch was split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colloid.algorithms.corrections import CorrectionConfig, CorrectionInputs, CustomCorrection, correct
from colloid.algorithms.kl import KL_KINDS, exp_log_ratio, kl_penalty
from colloid.algorithms.losses import POLICY_LOSSES, LossConfig, PolicyLossInputs
from colloid.algorithms.segments import masked

Metrics = dict[str, tuple[Tensor, Tensor]]
"""name -> (weighted sum, weight), float64 scalars without gradient. Add both over micro-batches and ranks, then divide.
A name whose total weight is 0 was not measured."""


@dataclass(frozen=True)
class ObjectiveConfig(LossConfig):
    """What the objective is made of."""

    policy_loss: str = "ppo"
    """An entry of `losses.POLICY_LOSSES`."""
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    use_rollout_logprobs: bool = False
    """The engine's log-probs are the behaviour policy's."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __post_init__(self) -> None:
        if self.policy_loss not in POLICY_LOSSES:
            raise ValueError(f"unknown policy loss {self.policy_loss!r}: it is one of {', '.join(POLICY_LOSSES)}")
        if self.kl_loss_type not in KL_KINDS:
            raise ValueError(f"unknown --kl-loss-type {self.kl_loss_type!r}: it is one of {', '.join(KL_KINDS)}")
        if min(self.clip_bounds) < 0:
            raise ValueError(f"the clip bounds are {self.clip_bounds}; they are not negative")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c is {self.eps_clip_c}; it is above 1")
        if self.use_unbiased_kl and not self.use_kl_loss:
            raise ValueError("--use-unbiased-kl changes the KL loss, and there is none: add --use-kl-loss")


@dataclass(frozen=True)
class ObjectiveInputs:
    """R response tokens of a micro-batch, packed (see `segments.py`); log-probs at the sampling temperature.

    Whatever stands at masked positions, infinite or NaN, influences nothing.
    """

    log_probs: Tensor
    """[R], with gradient."""
    advantages: Tensor
    """[R]."""
    sample_index: Tensor
    """int64 [R], from 0."""
    loss_mask: Tensor
    """bool [R]."""
    token_weights: Tensor
    """[R]: `RolloutBatch.loss_weights` of each token's sample."""
    num_samples: int
    old_log_probs: Tensor | None = None
    """[R], the trainer's before the rollout's first step; None: this is that step, and they are `log_probs` without
    gradient."""
    trainer_known: bool = True
    """False: they were not computed, as the engine's are the behaviour policy's; nothing is compared with them."""
    ref_log_probs: Tensor | None = None
    """[R]; needed for the KL loss."""
    rollout_log_probs: Tensor | None = None
    """[R], the engine's; NaN where there are none."""
    entropy: Tensor | None = None
    """[R], with gradient where `entropy_coef` is not 0, in which case it is needed."""
    custom_correction: CustomCorrection | None = None
    """Of the policy loss, before those of the configuration."""
    policy_reducer: Callable[[Tensor], Tensor] | None = None
    """[R] -> the policy loss of the micro-batch, a scalar that is summed over micro-batches and ranks; in place of the
    token weights, which KL loss, entropy and metrics keep."""
    share: float | None = None
    """This micro-batch's share of the step: 1 / (its micro-batches on all ranks). With it, terms of the loss are
    reported over the step's denominators, as the loss has them; without it, over the tokens seen here."""


def objective(inputs: ObjectiveInputs, config: ObjectiveConfig) -> tuple[Tensor, Metrics]:
    """Loss of a micro-batch (a scalar with gradient, to be summed) and its metrics.

    Metrics: `loss`, `pg_loss`, `kl_loss`, `entropy_loss` (the mean entropy), `ppo_kl` (the mean of old - new
    log-probs), `pg_clipfrac`, `train_rollout_logprob_abs_diff`, and those of `corrections.correct`; those that can be
    measured.

    Raises:
        ValueError: an input that the configuration needs is missing.
    """
    mask = inputs.loss_mask
    log_probs = masked(inputs.log_probs, mask)
    trainer = log_probs.detach() if inputs.old_log_probs is None else masked(inputs.old_log_probs.to(log_probs), mask)
    rollout = None if inputs.rollout_log_probs is None else masked(inputs.rollout_log_probs.to(log_probs), mask)
    old = rollout if config.use_rollout_logprobs and rollout is not None else trainer
    advantages = masked(inputs.advantages.to(log_probs), mask)
    sums = _WeightedSums(inputs, log_probs.dtype)

    policy = POLICY_LOSSES[config.policy_loss](
        PolicyLossInputs(log_probs, old, advantages, inputs.sample_index, mask, inputs.num_samples), config
    )
    known_trainer = trainer if inputs.trainer_known else None
    given = CorrectionInputs(
        log_probs.detach(), old, known_trainer, rollout, advantages, inputs.sample_index, mask, inputs.num_samples
    )
    corrected = _corrected(policy.loss, given, inputs.custom_correction, config.correction, sums)
    loss = sums.term("pg_loss", corrected, inputs.policy_reducer)
    if config.use_kl_loss:
        ref = masked(_needed(inputs.ref_log_probs, "reference log-probs", "--use-kl-loss").to(log_probs), mask)
        ratio = exp_log_ratio(log_probs - old) if config.use_unbiased_kl else None
        kl = sums.term("kl_loss", kl_penalty(log_probs, ref, config.kl_loss_type, ratio=ratio))
        loss = loss + config.kl_loss_coef * kl
    if config.entropy_coef:
        entropy = _needed(inputs.entropy, "the entropy", "--entropy-coef")
        loss = loss - config.entropy_coef * sums.term("entropy_loss", entropy)
    elif inputs.entropy is not None:
        sums.measure("entropy_loss", inputs.entropy, mask)
    sums.record("loss", loss)

    sums.measure("ppo_kl", old - log_probs, mask)
    if policy.clipped is not None:
        sums.measure("pg_clipfrac", policy.clipped, mask)
    if rollout is not None and inputs.trainer_known:
        known = mask & ~torch.isnan(rollout)
        sums.measure("train_rollout_logprob_abs_diff", (trainer - rollout).abs(), known)
    return loss, sums.metrics


class _WeightedSums:
    """Sums over unmasked tokens with the token weights, remembered as metrics."""

    def __init__(self, inputs: ObjectiveInputs, dtype: torch.dtype):
        self.metrics: Metrics = {}
        self._mask = inputs.loss_mask
        self._weights = masked(inputs.token_weights, inputs.loss_mask).to(torch.float64)
        self._loss_weights = self._weights.to(dtype)
        total = self._weights.sum()
        self._share = total if inputs.share is None else torch.full_like(total, inputs.share)

    def term(self, name: str, values: Tensor, reducer: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """A term of the loss: its weighted sum, or what a reducer makes of it; with gradient."""
        values = masked(values, self._mask)
        value = reducer(values) if reducer else (self._loss_weights * values).sum()
        self.record(name, value)
        return value

    def record(self, name: str, value: Tensor) -> None:
        self.metrics[name] = (value.detach().to(torch.float64), self._share)

    def measure(self, name: str, values: Tensor, mask: Tensor) -> None:
        """A diagnostic, over the tokens where it was measured."""
        weights = masked(self._weights, mask)
        self.metrics[name] = ((weights * masked(values.detach().to(torch.float64), mask)).sum(), weights.sum())


def _corrected(
    loss: Tensor,
    inputs: CorrectionInputs,
    custom: CustomCorrection | None,
    config: CorrectionConfig,
    sums: _WeightedSums,
) -> Tensor:
    """[R]: the policy loss after its corrections; their metrics go to `sums`."""
    correction = correct(inputs, config)
    measured = dict(correction.measured)
    if custom is not None:
        loss, kept, custom_metrics = custom(loss, inputs)
        loss = masked(loss, kept)
        measured |= custom_metrics
    for name, (values, mask) in measured.items():
        sums.measure(name, values, mask)
    return loss if correction.weights is None else loss * correction.weights


def _needed(values: Tensor | None, what: str, option: str) -> Tensor:
    if values is None:
        raise ValueError(f"{option} needs {what}")
    return values
