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

from colloid.errors import ConfigError
from colloid.models.hf import rope_parameters
from colloid.training.megatron import cpu

if cpu.installed():
    # Without Transformer Engine this is True by mistake (0.16.1), and stand-ins are given to isinstance.
    multi_latent_attention.HAVE_TE = False
    # Built without this argument, it asks for the CUDA device.
    multi_latent_attention.YarnRotaryEmbedding = functools.partial(YarnRotaryEmbedding, use_cpu_initialization=True)


def latent_attention_fields(args: Any) -> dict[str, Any]:
    """Fields of `MLATransformerConfig`.

    Raises:
        ConfigError: a kind of rotary scaling that is not supported.
    """
    return {
        "multi_latent_attention": True,
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_head_dim": args.qk_head_dim,
        "qk_pos_emb_head_dim": args.qk_pos_emb_head_dim,
        "v_head_dim": args.v_head_dim,
        "rotary_base": args.rotary_base,
        "rotary_percent": 1.0,
        **_rope_fields(args.hf_config),
    }


def _rope_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    rope = rope_parameters(hf_config)
    kind = rope["rope_type"]
    if kind == "default":
        # The scale of the softmax looks at these for every kind; Megatron's default factor is 40.
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise ConfigError(
            f"rope scaling of type {kind!r} is not supported with latent attention; supported are default and yarn"
        )
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
    }


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
