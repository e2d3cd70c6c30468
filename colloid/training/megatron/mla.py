"""Multi-head latent attention (DeepSeek-V3 and its relatives) on Megatron's local specs.

Megatron's own attention is used, but for its down-projections. The local spec cuts them over tensor-parallel ranks and
gathers what comes out; the gather's backward takes this rank's slice and does not add what the other ranks' heads say
about the latents and the shared rotary key, so that every gradient below would be wrong. Here each rank has them whole,
as with Transformer Engine.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from colloid.training.megatron import cpu

if cpu.installed():
    # Without Transformer Engine this is True by mistake (0.16.1), and stand-ins are given to isinstance.
    multi_latent_attention.HAVE_TE = False
    # Built without this argument, it asks for the CUDA device.
    multi_latent_attention.YarnRotaryEmbedding = functools.partial(YarnRotaryEmbedding, use_cpu_initialization=True)


class LatentAttention(MLASelfAttention):
    """MLASelfAttention with the whole down-projections on every tensor-parallel rank."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.config
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)


class WholeLinear(torch.nn.Module):
    """A linear layer from the hidden size whose weight is whole on every tensor-parallel rank.

    Each rank feeds its part of the sequence, and `finalize_model_grads` sums the gradient. (All models with latent
    attention have experts, which need sequence parallelism beside tensor parallelism.)

    Args:
        out_features: columns of the output.
    """

    def __init__(self, config: TransformerConfig, out_features: int):
        super().__init__()
        assert config.sequence_parallel or config.tensor_model_parallel_size == 1
        device = "cpu" if config.use_cpu_initialization else "cuda"
        shape = (out_features, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., H] -> ([..., out_features], no bias)."""
        return F.linear(hidden, self.weight), None
