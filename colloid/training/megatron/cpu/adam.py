"""Adam with the interface of Transformer Engine's and Apex's FusedAdam: `step` lives in the parameter group.

Megatron's fallback to torch.optim is broken for checkpoints of the distributed optimizer (one shared `step` tensor),
so on CPU it gets an optimizer of the kind that it gets on GPUs. The update itself is torch's fused CPU kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adam import adam


class FusedAdam(torch.optim.Optimizer):
    """Adam (`adam_w_mode=False`: weight decay as L2 in the gradient) or AdamW.

    Args:
        params: parameters or parameter groups.
        adam_w_mode: decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_fused_options: Any,
    ):
        if not bias_correction:
            raise NotImplementedError("Adam without bias correction")
        groups = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, groups)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            # The kernel counts the step up itself.
            steps = [torch.tensor(float(group["step"] - 1)) for _ in params]
            adam(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                steps,
                fused=True,
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
