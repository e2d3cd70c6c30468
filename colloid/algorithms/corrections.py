"""Corrections of the policy loss for samples that the policy of the loss did not make.

Two gaps are meant. Between the engine that sampled and the trainer: r = trainer - rollout log-probs, of the same
weights in other kernels or another precision, or of older weights. And between the behaviour policy and the policy now
(OPSM).

What is corrected is the policy loss alone: KL loss and entropy keep all tokens, and the denominators stay those of the
step's global batch, so that a rejected token is one with policy loss 0. No weight carries gradient. Tokens without
rollout log-probs (NaN) have weight 1, and are never rejected for their ratio.

R response tokens, packed (see `segments.py`). A level says what a token's ratio is: `token`, exp(r); `sequence`,
exp(the sum of r over the sample); `geometric`, exp(its mean). Exponents are clamped to +-20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from colloid.algorithms.kl import exp_log_ratio
from colloid.algorithms.segments import masked, segment_mean, segment_sum

Measured = dict[str, tuple[Tensor, Tensor]]
"""Metric -> (values [R], bool [R] where it was measured), to be averaged with the token weights."""

LEVELS = ("token", "sequence", "geometric")
MODES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "clip": lambda ratio, low, high: ratio.clamp(low, high),
    "truncate": lambda ratio, _low, high: ratio.clamp(max=high),
    "mask": lambda ratio, low, high: masked(ratio, (ratio >= low) & (ratio <= high)),
}
"""How an importance weight is bounded: into both bounds, from above alone, or 0 outside of them."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Which corrections."""

    use_tis: bool = False
    """Multiply by the importance weight of trainer over engine."""
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    tis_level: str = "token"
    tis_mode: str = "clip"
    rs_level: str = "token"
    rs_lower_bound: float | None = None
    """Tokens (or samples, as `rs_level` says) with a ratio below this are rejected."""
    rs_upper_bound: float | None = None
    rs_veto_threshold: float | None = None
    """A sample with a token whose own ratio is below this is rejected whole."""
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    mismatch_metrics: bool = False

    @property
    def compares_with_engine(self) -> bool:
        """Whether the trainer's log-probs before the first step are compared with the engine's."""
        return self.use_tis or self.rejects or self.mismatch_metrics

    @property
    def rejects(self) -> bool:
        """Whether anything is rejected for its ratio to the engine."""
        return any(bound is not None for bound in (self.rs_lower_bound, self.rs_upper_bound, self.rs_veto_threshold))

    def __post_init__(self) -> None:
        for level in (self.tis_level, self.rs_level):
            if level not in LEVELS:
                raise ValueError(f"unknown level {level!r}: it is one of {', '.join(LEVELS)}")
        if self.tis_mode not in MODES:
            raise ValueError(f"unknown mode {self.tis_mode!r}: it is one of {', '.join(MODES)}")


@dataclass(frozen=True)
class CorrectionInputs:
    """Log-probs without gradient, finite at unmasked tokens; 0 at masked ones."""

    log_probs: Tensor
    """[R], the policy's now."""
    old_log_probs: Tensor
    """[R], the behaviour policy's, as the policy loss has them."""
    trainer_log_probs: Tensor | None
    """[R], the trainer's before the rollout's first step; None: not known."""
    rollout_log_probs: Tensor | None
    """[R], the engine's; NaN where there are none."""
    advantages: Tensor
    """[R]."""
    sample_index: Tensor
    """int64 [R]."""
    loss_mask: Tensor
    """bool [R]."""
    num_samples: int

    def sample_mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """[R]: at each token the mean of `values` over its sample's tokens in `mask`."""
        return segment_mean(values, mask, self.sample_index, self.num_samples)[self.sample_index]

    def sample_sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """[R]: at each token the sum of `values` over its sample's tokens in `mask`."""
        return segment_sum(masked(values, mask), self.sample_index, self.num_samples)[self.sample_index]


CustomCorrection = Callable[[Tensor, CorrectionInputs], tuple[Tensor, Tensor, Measured]]
"""(policy loss [R] with gradient, inputs) -> (it corrected [R], bool [R] what is kept, metrics)."""


@dataclass(frozen=True)
class Correction:
    """What to do to the policy loss."""

    weights: Tensor | None
    """[R], to multiply it by; 0 where rejected. None: nothing is corrected."""
    measured: Measured


def correct(inputs: CorrectionInputs, config: CorrectionConfig) -> Correction:
    """All corrections that `config` asks for, multiplied.

    Metrics: `tis` (the mean weight), `tis_clipfrac` (tokens whose ratio was out of bounds), `rs_rejected`,
    `opsm_clipfrac`, and those of `mismatch`; those that can be measured.

    Raises:
        ValueError: trainer or rollout log-probs are needed, and there are none of the former.
    """
    weights: list[Tensor] = []
    measured: Measured = {}
    if inputs.rollout_log_probs is not None:
        known = inputs.loss_mask & ~torch.isnan(inputs.rollout_log_probs)
        if config.use_tis or config.rejects:
            if inputs.trainer_log_probs is None:
                raise ValueError("--use-tis and rejection compare with the trainer's log-probs, which are not known")
            log_ratio = masked(inputs.trainer_log_probs - inputs.rollout_log_probs, known)
            if config.use_tis:
                weights.append(_tis(inputs, config, log_ratio, known, measured))
            if config.rejects:
                kept = _kept(inputs, config, log_ratio, known)
                measured["rs_rejected"] = ~kept, inputs.loss_mask
                weights.append(kept.to(log_ratio))
        if config.mismatch_metrics and inputs.trainer_log_probs is not None:
            measured |= mismatch(inputs, inputs.trainer_log_probs, inputs.rollout_log_probs, known)
    if config.use_opsm:
        off_policy = off_policy_sequences(inputs, config.opsm_delta)
        measured["opsm_clipfrac"] = off_policy, inputs.loss_mask
        weights.append((~off_policy).to(inputs.old_log_probs))
    if not weights:
        return Correction(None, measured)
    product = weights[0]
    for further in weights[1:]:
        product = product * further
    return Correction(product, measured)


def ratios(inputs: CorrectionInputs, log_ratio: Tensor, known: Tensor, level: str) -> Tensor:
    """[R]: each token's ratio at this level; 1 where none of a sample's tokens is known."""
    if level == "sequence":
        log_ratio = inputs.sample_sum(log_ratio, known)
    elif level == "geometric":
        log_ratio = inputs.sample_mean(log_ratio, known)
    return exp_log_ratio(log_ratio)


def _tis(
    inputs: CorrectionInputs, config: CorrectionConfig, log_ratio: Tensor, known: Tensor, measured: Measured
) -> Tensor:
    """[R]: importance weights of trainer over engine, bounded (truncated importance sampling)."""
    ratio = ratios(inputs, log_ratio, known, config.tis_level)
    bounded = MODES[config.tis_mode](ratio, config.tis_clip_low, config.tis_clip)
    measured["tis"] = bounded, known
    measured["tis_clipfrac"] = bounded != ratio, known
    return masked(bounded, known, 1.0)


def _kept(inputs: CorrectionInputs, config: CorrectionConfig, log_ratio: Tensor, known: Tensor) -> Tensor:
    """bool [R]: what is not rejected."""
    ratio = ratios(inputs, log_ratio, known, config.rs_level)
    rejected = torch.zeros_like(known)
    if config.rs_lower_bound is not None:
        rejected |= ratio < config.rs_lower_bound
    if config.rs_upper_bound is not None:
        rejected |= ratio > config.rs_upper_bound
    rejected &= known
    if config.rs_veto_threshold is not None:
        vetoed = known & (exp_log_ratio(log_ratio) < config.rs_veto_threshold)
        rejected |= inputs.sample_sum(vetoed.to(log_ratio), known) > 0
    return ~rejected


def off_policy_sequences(inputs: CorrectionInputs, delta: float) -> Tensor:
    """bool [R]: tokens with a negative advantage in samples whose mean of old - new log-probs is above `delta`
    (off-policy sequence masking, arXiv:2512.02556)."""
    drift = inputs.sample_mean(inputs.old_log_probs - inputs.log_probs, inputs.loss_mask)
    return (inputs.advantages < 0) & (drift > delta)


def mismatch(inputs: CorrectionInputs, trainer: Tensor, rollout: Tensor, known: Tensor) -> Measured:
    """How trainer and engine differ on the same tokens and weights. With r = trainer - rollout log-probs:

    | metric | value |
    |---|---|
    | `mismatch_kl` | mean of -r: the KL of the engine's policy from the trainer's, by k1 |
    | `mismatch_k3_kl` | mean of exp(r) - 1 - r: the same by k3 |
    | `mismatch_ratio` | mean of exp(r); 1 where they agree |
    | `mismatch_chi2_token`, `mismatch_chi2_sequence` | mean of ratio^2 - 1, of tokens and of samples |
    | `mismatch_trainer_ppl`, `mismatch_rollout_ppl` | exp(- mean log-prob of a sample) |
    | `mismatch_log_ppl_diff` | mean over samples of - mean r: log of the one over the other |
    """
    log_ratio = masked(trainer - rollout, known)
    ratio = exp_log_ratio(log_ratio)
    whole = ratios(inputs, log_ratio, known, "sequence")
    values = {
        "mismatch_kl": -log_ratio,
        "mismatch_k3_kl": ratio - 1 - log_ratio,
        "mismatch_ratio": ratio,
        "mismatch_chi2_token": ratio**2 - 1,
        "mismatch_chi2_sequence": whole**2 - 1,
        "mismatch_trainer_ppl": exp_log_ratio(-inputs.sample_mean(trainer, known)),
        "mismatch_rollout_ppl": exp_log_ratio(-inputs.sample_mean(rollout, known)),
        "mismatch_log_ppl_diff": -inputs.sample_mean(log_ratio, known),
    }
    return {name: (value, known) for name, value in values.items()}
