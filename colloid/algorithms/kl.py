"""Estimates, token by token, of the KL divergence of the policy from the reference model.

With k = log_probs - ref_log_probs of the sampled token (Schulman, "Approximating KL divergence", 2020):

| kind | value | |
|---|---|---|
| `k1` | k | its gradient on-policy is zero in expectation: as a loss it holds nothing |
| `k2` | k^2 / 2 | |
| `k3` | exp(-k) - 1 + k | unbiased, never negative |
| `low_var_kl` | k3, clamped to +-10 | the default |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Exponents of log-ratios are clamped to plus or minus this, so that no sample can make the loss infinite."""
MAX_LOW_VAR_KL = 10.0


def exp_log_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20 (no gradient outside)."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _k3(k: Tensor) -> Tensor:
    return exp_log_ratio(-k) - 1 + k


KL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda k: k,
    "k2": lambda k: k**2 / 2,
    "k3": _k3,
    "low_var_kl": _k3,
}


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str, *, ratio: Tensor | None = None) -> Tensor:
    """[R]: the estimate for each token.

    Args:
        ratio: [R], the importance ratio that makes the estimate unbiased off-policy (`--use-unbiased-kl`). It
            multiplies before the clamp of `low_var_kl`, and its gradient is part of the result's.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimate {kind!r}: it is one of {', '.join(KL_KINDS)}")
    penalty = KL_KINDS[kind](log_probs - ref_log_probs)
    if ratio is not None:
        penalty = ratio * penalty
    if kind == "low_var_kl":
        penalty = torch.clamp(penalty, -MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)
    return penalty
