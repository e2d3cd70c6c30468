"""The critic's loss, and how well its values explain the returns. `R` packed response tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from colloid.algorithms.segments import masked

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Metric -> (weighted sum, weight)."""

Totals = Mapping[str, tuple[float, float]]
"""The same, added up over all micro-batches and ranks."""

_MOMENTS = ("return", "return_square", "error", "error_square")
"""Sums over unmasked tokens that `explained_variance` is made of."""


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float,
    loss_mask: Tensor,
    token_weights: Tensor,
    share: float,
) -> tuple[Tensor, Metrics]:
    """The weighted sum of max((V - R)², (clip(V, V_old ± clip) - R)²), without a factor ½.

    Args:
        values: [R], with gradient.
        old_values: [R], those that the returns were made with.
        returns: [R].
        loss_mask: bool [R].
        token_weights: [R], as in `ObjectiveInputs`.
        share: this micro-batch's share of the step, as in `ObjectiveInputs`.

    Returns:
        A scalar, to be summed over micro-batches and ranks; and the metrics `value_loss` and `value_clipfrac`, with
        the sums for `explained_variance`, in which every token counts the same.
    """
    weights = masked(token_weights, loss_mask)
    values = masked(values, loss_mask)
    old, wanted = (masked(given, loss_mask).to(values) for given in (old_values, returns))
    plain = (values - wanted) ** 2
    clipped = (torch.minimum(torch.maximum(values, old - clip), old + clip) - wanted) ** 2
    loss = (weights.to(values) * torch.maximum(plain, clipped)).sum()
    exact = weights.to(torch.float64)
    metrics = {
        "value_loss": (loss.detach().to(torch.float64), torch.full_like(exact.sum(), share)),
        "value_clipfrac": ((exact * (clipped > plain)).sum(), exact.sum()),
    }
    wanted = masked(returns, loss_mask).to(torch.float64)
    errors = wanted - masked(old_values, loss_mask).to(torch.float64)
    count = loss_mask.sum(dtype=torch.float64)
    for name, terms in zip(_MOMENTS, (wanted, wanted**2, errors, errors**2), strict=True):
        metrics[name] = (terms.sum(), count)
    return loss, metrics


def added(totals: Iterable[Totals]) -> Totals:
    """The sums of several steps as one."""
    whole: dict[str, tuple[float, float]] = {}
    for each in totals:
        for name, (value, weight) in each.items():
            before = whole.get(name, (0.0, 0.0))
            whole[name] = before[0] + value, before[1] + weight
    return whole


def means(totals: Totals) -> dict[str, float]:
    """Metrics of a step, from its sums over micro-batches and ranks: the two of the loss, and `explained_variance` of
    the returns by the values from before training, 1 - Var(R - V) / Var(R). It is left out where all returns are equal.
    """
    found = {name: value / weight for name, (value, weight) in totals.items() if weight}
    moments = [found.pop(name, 0.0) for name in _MOMENTS]
    variance, unexplained = (square - mean**2 for mean, square in zip(moments[::2], moments[1::2], strict=True))
    if variance > 1e-12 * moments[1]:
        found["explained_variance"] = 1 - unexplained / variance
    return found
