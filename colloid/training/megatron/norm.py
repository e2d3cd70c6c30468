"""RMSNorm for Megatron's local specs: its own wrapper of torch's norm refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension.

    Its weight is marked as Transformer Engine's is, so that `finalize_model_grads` sums its gradient over the tensor
    parallel group under sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class LatentNorm(RMSNorm):
    """The norm over a latent of multi-head latent attention: its epsilon is 1e-6 in every model, whatever the config
    says of the others.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, **_unused: Any):
        super().__init__(config, hidden_size, 1e-6)
