"""Adam without moments (`--use-stateless-adam`): every update is the first one of a fresh Adam, so nothing is kept.

With g the gradient, the bias-corrected moments of a first update are g and g², whatever the betas:

    p <- p - lr * weight_decay * p - lr * g / (|g| + eps)

the same as `--reset-optimizer-states` with one step a rollout, in a third of the memory. Weight decay is decoupled as
in AdamW (Loshchilov and Hutter, arXiv 1711.05101), or part of g as in Adam.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer


class StatelessAdam(torch.optim.Optimizer):
    """Takes the place of an Adam that Megatron made, and takes over its groups of parameters.

    Args:
        other: that optimizer; must have made no step.
        decoupled: weight decay is apart from the gradient.
    """

    def __init__(self, other: torch.optim.Optimizer, *, decoupled: bool):
        # torch would refuse the groups: parts of the distributed optimizer's buffers are no leaves.
        super().__init__([torch.nn.Parameter(torch.empty(0))], other.defaults)
        self.param_groups, self._decoupled = other.param_groups, decoupled

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            rate, decay = group["lr"], group["weight_decay"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if self._decoupled:
                    parameter.mul_(1 - rate * decay)
                elif decay:
                    grad = grad.add(parameter, alpha=decay)
                parameter.addcdiv_(grad, grad.abs().add_(group["eps"]), value=-rate)


def make_stateless(optimizer: MegatronOptimizer) -> None:
    """Gives each part of Megatron's optimizer a `StatelessAdam`."""
    for part in parts(optimizer):
        if part.optimizer is not None:
            part.optimizer = StatelessAdam(part.optimizer, decoupled=part.config.decoupled_weight_decay)


@contextmanager
def with_moments(optimizer: MegatronOptimizer | None) -> Iterator[None]:
    """To save in: while it is open, a stateless optimizer of bf16 parameters has moments of 0, as Megatron saves main
    parameters in float32 only together with those. Others are left as they are.
    """
    for part in _stateless(optimizer) if optimizer and optimizer.config.bf16 else []:
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            zeros = torch.zeros_like(parameter)  # Nothing writes to them: one tensor is enough.
            part.optimizer.state[parameter] = {"exp_avg": zeros, "exp_avg_sq": zeros}
    try:
        yield
    finally:
        forget_moments(optimizer)


def forget_moments(optimizer: MegatronOptimizer | None) -> None:
    """Drops what a checkpoint gave to a stateless optimizer."""
    for part in _stateless(optimizer) if optimizer else []:
        part.optimizer.state.clear()


def _stateless(optimizer: MegatronOptimizer) -> list[Any]:
    return [part for part in parts(optimizer) if isinstance(part.optimizer, StatelessAdam)]


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron chains several where experts are parallel."""
    return getattr(optimizer, "chained_optimizers", [optimizer])
