"""The loss of supervised fine-tuning: -lp of the trained tokens, with the denominators that the policy loss has."""

from __future__ import annotations

import torch
from torch import Tensor

from colloid.algorithms.segments import masked

Metrics = dict[str, tuple[Tensor, Tensor]]


def sft_objective(log_probs: Tensor, loss_mask: Tensor, token_weights: Tensor, share: float) -> tuple[Tensor, Metrics]:
    """Loss of a micro-batch (a scalar with gradient, to be summed over micro-batches and ranks), and the metric `loss`.

    Args:
        log_probs: [R], with gradient, at temperature 1. What stands at masked positions influences nothing.
        loss_mask: bool [R].
        token_weights: [R], see `ObjectiveInputs`.
        share: this micro-batch's of the step, see `ObjectiveInputs`.
    """
    weights = masked(token_weights, loss_mask).to(log_probs.dtype)
    loss = -(weights * masked(log_probs, loss_mask)).sum()
    value = loss.detach().to(torch.float64)
    return loss, {"loss": (value, torch.full_like(value, share))}
