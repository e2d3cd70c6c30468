"""What a model family's name table is made of. A table is read in both directions: loading merges Hugging Face tensors
into Megatron's, sync and export split Megatron's into Hugging Face's.

An entry stands for one Megatron parameter: of every layer, where its names hold `{layer}`, and of every expert, where
they hold `{expert}`. How the parameter is cut over tensor-parallel ranks is a property of the entry; experts, which are
cut over the ranks of expert tensor parallelism and dealt out over those of expert parallelism, say so too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelShape:
    """The numbers that the transforms need."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    q_lora: bool = False
    """Latent attention whose queries have a latent too."""
    num_experts: int = 0
    expert_layers: tuple[bool, ...] = ()
    """Of each layer, whether it has experts; empty: none has."""

    def has_experts(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return bool(self.expert_layers) and self.expert_layers[layer]


class Shard(enum.Enum):
    """How tensor parallelism cuts a Megatron parameter."""

    REPLICATED = "replicated"
    ROWS = "rows"
    """Dimension 0 in equal parts."""
    COLUMNS = "columns"
    """Dimension 1 in equal parts."""
    GATED_ROWS = "gated rows"
    """Dimension 0 holds gate and up, one after the other; each is cut, and a rank has its part of both."""

    def cut(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """The part of `full` that belongs to tensor-parallel rank `rank` of `size`."""
        if size == 1 or self is Shard.REPLICATED:
            return full
        if self is Shard.GATED_ROWS:
            return torch.cat([half.chunk(size, 0)[rank] for half in full.chunk(2, 0)])
        return full.chunk(size, 1 if self is Shard.COLUMNS else 0)[rank]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `cut`."""
        if len(parts) == 1 or self is Shard.REPLICATED:
            return parts[0]
        if self is Shard.GATED_ROWS:
            halves = zip(*(part.chunk(2, 0) for part in parts), strict=True)
            return torch.cat([torch.cat(half) for half in halves])
        return torch.cat(list(parts), 1 if self is Shard.COLUMNS else 0)


Present = Callable[[ModelShape, int], bool]
"""(the model, a layer of it) -> whether that layer has the parameter."""

Merge = Callable[[Sequence[torch.Tensor], ModelShape], torch.Tensor]
Split = Callable[[torch.Tensor, ModelShape], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Transform:
    """Hugging Face tensors (in the order of the entry's names) -> Megatron's, and back."""

    merge: Merge
    split: Split


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter."""

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    """Its spellings: in Megatron's local spec, then in that with Transformer Engine where it differs."""
    transform: Transform
    shard: Shard = Shard.REPLICATED
    exported: bool = True
    """False: a copy of what another entry exports."""
    present: Present = lambda shape, layer: True

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one of the routed experts."""
        return "{expert}" in self.hf[0]


def _merge_qkv(tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    groups = shape.num_query_groups
    return torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], 1).flatten(0, 1)


def _split_qkv(tensor: torch.Tensor, shape: ModelShape) -> Sequence[torch.Tensor]:
    queries = shape.num_attention_heads // shape.num_query_groups
    heads = tensor.unflatten(0, (shape.num_query_groups, queries + 2, -1))
    return [part.flatten(0, 2) for part in heads.split((queries, 1, 1), 1)]


def _pad_vocab(tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    (tensor,) = tensors
    padding = shape.padded_vocab_size - shape.vocab_size
    return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor


SAME = Transform(lambda tensors, shape: tensors[0], lambda tensor, shape: [tensor])
QKV = Transform(_merge_qkv, _split_qkv)
"""Megatron holds, group by group, the group's query heads, its key head and its value head. Weight or bias."""
GATE_UP = Transform(lambda tensors, shape: torch.cat(list(tensors)), lambda tensor, shape: tensor.chunk(2, 0))
VOCAB = Transform(_pad_vocab, lambda tensor, shape: [tensor[: shape.vocab_size]])
"""Rows past the vocabulary are zero, and belong to Megatron alone."""
