"""Core attention over a pack of sequences for Megatron's local specs.

A pack costs what its sequences cost: each attends to itself alone, and no mask over the pack is ever made. Neighbours
of equal length share one kernel call, so it pays to sort a pack by length.

`T` packed tokens, `N` query heads, `G` key-value heads, `D` head size.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from colloid.errors import ConfigError


class PackedAttention(MegatronModule):
    """Causal self-attention with grouped queries, each sequence of the pack by itself."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_unused: Any,
    ):
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ConfigError("--context-parallel-size above 1 is not supported yet without Transformer Engine")
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams,
        **_unused: Any,
    ) -> torch.Tensor:
        """Query [T, N, D], key and value [T, G, D] -> [T, N * D]."""
        blocks = equal_length_blocks(packed_seq_params.cu_seqlens_q)
        sizes = [count * length for count, length in blocks]
        grouped = query.shape[1] != key.shape[1]
        outputs = []
        parts = zip(blocks, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        for (count, length), *tensors in parts:
            q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in tensors)
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
            outputs.append(output.transpose(1, 2).flatten(2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def equal_length_blocks(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    """Runs of equal length among the sequences of a pack, as (number of sequences, their length).

    Args:
        cu_seqlens: int [number of sequences + 1], cumulative lengths.
    """
    return [(len(list(run)), length) for length, run in groupby(cu_seqlens.diff().tolist())]
