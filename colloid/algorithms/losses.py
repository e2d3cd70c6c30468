"""Policy losses, token by token: pure functions from one record to another. A new one is an entry of POLICY_LOSSES.

Notation: d = log_probs - old_log_probs, the ratio is exp(d), A the advantage. Callers pass 0 for log-probs at masked
positions; what a loss is there does not matter, as it is selected away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from colloid.algorithms.kl import exp_log_ratio
from colloid.algorithms.segments import segment_mean


@dataclass(frozen=True)
class LossConfig:
    """Knobs of the policy losses."""

    eps_clip: float = 0.2
    """How far the ratio may fall below 1."""
    eps_clip_high: float | None = None
    """How far it may rise above 1; None: `eps_clip`."""
    eps_clip_c: float | None = None
    """Dual clip: where A < 0 the loss is at most this times -A. Above 1."""
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Largest fall and rise of the ratio."""
        return self.eps_clip, self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


@dataclass(frozen=True)
class PolicyLossInputs:
    """R response tokens of `num_samples` samples, packed (see `segments.py`)."""

    log_probs: Tensor
    """[R], with gradient."""
    old_log_probs: Tensor
    """[R], of the behaviour policy."""
    advantages: Tensor
    """[R]."""
    sample_index: Tensor
    """int64 [R]."""
    loss_mask: Tensor
    """bool [R]."""
    num_samples: int

    @property
    def log_ratio(self) -> Tensor:
        return self.log_probs - self.old_log_probs

    def sample_mean(self, values: Tensor) -> Tensor:
        """[R]: at each token the mean of `values` [R] over its sample's unmasked tokens."""
        return segment_mean(values, self.loss_mask, self.sample_index, self.num_samples)[self.sample_index]


@dataclass(frozen=True)
class PolicyLossOutput:
    loss: Tensor
    """[R], to be weighted and summed."""
    clipped: Tensor | None
    """bool [R]: where clipping took effect; None for a loss that does not clip."""


def ppo_clip(inputs: PolicyLossInputs, config: LossConfig) -> PolicyLossOutput:
    """max(-ratio A, -clip(ratio) A) (arXiv:1707.06347), with asymmetric bounds (arXiv:2503.14476) and dual clip
    (arXiv:1912.09729)."""
    return _clipped_surrogate(inputs.log_ratio, inputs.advantages, config)


def gspo(inputs: PolicyLossInputs, config: LossConfig) -> PolicyLossOutput:
    """PPO clip of the sample's ratio: the exponential of its mean d, the same for all its tokens (arXiv:2507.18071)."""
    return _clipped_surrogate(inputs.sample_mean(inputs.log_ratio), inputs.advantages, config)


def _clipped_surrogate(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> PolicyLossOutput:
    low, high = config.clip_bounds
    ratio = exp_log_ratio(log_ratio)
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(free, bounded)
    if config.eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -config.eps_clip_c * advantages), loss)
    return PolicyLossOutput(loss, bounded > free)


def cispo(inputs: PolicyLossInputs, config: LossConfig) -> PolicyLossOutput:
    """REINFORCE with the clipped ratio as a weight without gradient (arXiv:2506.13585)."""
    low, high = config.clip_bounds
    ratio = exp_log_ratio(inputs.log_ratio).detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return PolicyLossOutput(-weight * inputs.advantages * inputs.log_probs, weight != ratio)


def gmpo(inputs: PolicyLossInputs, config: LossConfig) -> PolicyLossOutput:
    """The geometric mean of a sample's ratios, each clipped in the log domain (arXiv:2507.20673)."""
    low, high = config.clip_bounds
    sign, log_ratio = inputs.advantages.sign(), inputs.log_ratio
    pessimistic = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    ratio = exp_log_ratio(inputs.sample_mean(sign * pessimistic))
    return PolicyLossOutput(-inputs.advantages * ratio, pessimistic < sign * log_ratio)


def sapo(inputs: PolicyLossInputs, config: LossConfig) -> PolicyLossOutput:
    """A soft gate, sigmoid(tau (ratio - 1)), in place of the clip (arXiv:2511.20347)."""
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, config.sapo_tau_pos, config.sapo_tau_neg).to(advantages.dtype)
    gate = torch.sigmoid(tau * (exp_log_ratio(inputs.log_ratio) - 1)) * 4 / tau
    return PolicyLossOutput(-gate * advantages, None)


POLICY_LOSSES: dict[str, Callable[[PolicyLossInputs, LossConfig], PolicyLossOutput]] = {
    "ppo": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
}
