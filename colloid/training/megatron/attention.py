"""Core attention over a pack of sequences for Megatron's local specs.

A pack costs what its sequences cost: each attends to itself alone, and no mask over the pack is ever made. Neighbours
of equal length share one kernel call, so it pays to sort a pack by length.

Under context parallelism a rank has two chunks of each sequence (see `colloid.training.sequence_split`). Keys and
values are gathered; each chunk of queries sees the keys up to its own end.

`T` packed tokens of this rank, `N` query heads, `G` key-value heads, `D` head size; `S` sequences of one length, `C`
tokens of a chunk, `L` of a sequence.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


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
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.context_group = None
        if config.context_parallel_size > 1:
            self.context_group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()

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
        attend = self._whole
        if self.context_group is not None:
            attend, num_ranks = self._chunked, self.context_group.size()
            blocks = [(count, length // num_ranks) for count, length in blocks]
            key, value = (_gathered(tensor, self.context_group) for tensor in (key, value))
        sizes = [count * length for count, length in blocks]
        outputs = []
        parts = zip(blocks, *(tensor.split(sizes, tensor.dim() - 3) for tensor in (query, key, value)), strict=True)
        for (count, length), *tensors in parts:
            q, k, v = (x.unflatten(x.dim() - 3, (count, length)) for x in tensors)
            outputs.append(attend(q, k, v).flatten(2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _whole(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[S, L, N, D] of query, key and value (these with G heads)."""
        return self._attention(query, key, value, is_causal=True)

    def _chunked(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Query [S, 2 C, N, D] of this rank, key and value [ranks, S, 2 C, G, D] -> [S, 2 C, N, D]."""
        rank, num_ranks = self.context_group.rank(), self.context_group.size()
        key, value = (_in_sequence_order(tensor) for tensor in (key, value))
        length = query.shape[1] // 2
        outputs = []
        for chunk, q in zip((rank, 2 * num_ranks - 1 - rank), query.split(length, 1), strict=True):
            end = (chunk + 1) * length
            mask = torch.ones(length, end, dtype=torch.bool, device=q.device).tril(chunk * length)
            outputs.append(self._attention(q, key[:, :end], value[:, :end], attn_mask=mask))
        return torch.cat(outputs, 1)

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
        grouped = query.shape[2] != key.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=grouped, **how).transpose(1, 2)


def equal_length_blocks(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    """Runs of equal length among the sequences of a pack, as (number of sequences, their length).

    Args:
        cu_seqlens: int [number of sequences + 1], cumulative lengths.
    """
    return [(len(list(run)), length) for length, run in groupby(cu_seqlens.diff().tolist())]


def _gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """[T, G, D] of each rank -> [ranks, T, G, D]; the gradient of a rank's part is summed over all ranks."""
    return gather_from_sequence_parallel_region(tensor.contiguous(), group=group).unflatten(0, (group.size(), -1))


def _in_sequence_order(chunks: torch.Tensor) -> torch.Tensor:
    """[ranks, S, 2 C, …], two chunks of each sequence a rank -> [S, L, …]."""
    low, high = chunks.unflatten(2, (2, -1)).unbind(2)
    return torch.cat([low, high.flip(0)]).transpose(0, 1).flatten(1, 2)
