"""Multi-head latent attention (DeepSeek-V3 and its relatives) on Megatron's local specs.

Megatron's own attention is used, but for its down-projections. The local spec cuts them over tensor-parallel ranks and
gathers what comes out; the gather's backward takes this rank's slice and does not add what the other ranks' heads say
about the latents and the shared rotary key, so that every gradient below would be wrong. Here each rank has the whole
of them, as with Transformer Engine.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
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


FIELDS = (
    "kv_lora_rank",
    "mscale",
    "mscale_all_dim",
    "q_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "v_head_dim",
)
YARN_FIELDS = ("beta_fast", "beta_slow", "original_max_position_embeddings")


def latent_attention_fields(args: Any) -> dict[str, Any]:
    """Fields of `MLATransformerConfig`; those of the scaling follow from the model like all others."""
    names = FIELDS + (YARN_FIELDS if args.rope_type == "yarn" else ())
    return {"multi_latent_attention": True} | {name: getattr(args, name) for name in names}


class LatentAttention(MLASelfAttention):
    """MLASelfAttention with the whole down-projections on every tensor-parallel rank."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.config
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
        rotary = config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + rotary, shared_columns=rotary)


class WholeLinear(torch.nn.Module):
    """A linear layer from the hidden size whose weight is whole on every tensor-parallel rank.

    Under sequence parallelism each rank feeds its part of the sequence, and `finalize_model_grads` sums the gradient.

    Args:
        out_features: columns of the output.
        shared_columns: the last so many columns feed each rank's heads without a layer of Megatron's in between, so
            their gradient is summed over the ranks here (under sequence parallelism Megatron's gather does it).
    """

    def __init__(self, config: TransformerConfig, out_features: int, shared_columns: int = 0):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else "cuda"
        shape = (out_features, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel
        parted = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
        self._shared_columns = shared_columns if parted else 0

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[…, H] -> ([…, out_features], no bias)."""
        output = F.linear(hidden, self.weight)
        if self._shared_columns:
            own, shared = output.split([output.shape[-1] - self._shared_columns, self._shared_columns], -1)
            output = torch.cat([own, _SumGradient.apply(shared)], -1)
        return output, None


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over the tensor-parallel ranks.

    Megatron's `copy_to_tensor_model_parallel_region` loses the sum where the gradient is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total
