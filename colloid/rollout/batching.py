"""What the options say about micro-batches: their bounds, and what is spread evenly over them and over the ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from colloid.config.layout import data_parallel_size
from colloid.data.batch import RankBatch, RolloutBatch
from colloid.data.schedule import Bounds, build_rank_batches


def schedule(args: Any, batch: RolloutBatch, has_gradient: np.ndarray) -> list[RankBatch]:
    """One `RankBatch` for each data-parallel rank, as the options ask.

    Args:
        has_gradient: bool [B], see `build_rank_batches`.
    """
    return build_rank_batches(
        batch,
        data_parallel_size=data_parallel_size(args),
        num_steps=args.num_steps_per_rollout,
        bounds=micro_batch_bounds(args),
        has_gradient=has_gradient,
        costs=sequence_costs(args, batch.lengths) if args.balance_by_flops else None,
    )


def micro_batch_bounds(args: Any) -> Bounds:
    """The bounds of a micro-batch. The ranks of context parallelism share its tokens, so their budgets add up."""
    context = args.context_parallel_size
    chunk = 2 * context if context > 1 else 1
    # A pack is padded to a multiple of this; so it still fits when it is full.
    unit = math.lcm(chunk, context * args.tensor_model_parallel_size if args.sequence_parallel else 1)

    def budget(tokens: int | None) -> int | None:
        return None if tokens is None else max(tokens * context // unit, 1) * unit

    return Bounds(
        micro_batch_size=None if args.use_dynamic_batch_size else args.micro_batch_size,
        max_tokens=budget(args.max_tokens_per_gpu),
        log_probs_max_tokens=budget(args.log_probs_max_tokens_per_gpu),
        length_multiple=chunk,
    )


def sequence_costs(args: Any, lengths: np.ndarray) -> np.ndarray:
    """int64 [N]: the floating-point operations of sequences, in units of those of one query and key in attention.

    A sequence of length L takes 2 L operations a weight that it meets, and L² (query and value dimensions) in causal
    attention (Narayanan et al. 2021, appendix).
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    attention = args.num_layers * args.num_attention_heads * sum(_head_dimensions(args))
    weights = (
        _attention_weights(args) * args.num_layers + _mlp_weights(args) + args.hidden_size * (args.vocab_size or 0)
    )
    return lengths * max(1, round(2 * weights / attention)) + lengths**2


def _head_dimensions(args: Any) -> tuple[int, int]:
    if args.multi_latent_attention:
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return args.kv_channels, args.kv_channels


def _attention_weights(args: Any) -> int:
    """Of one layer."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    query, value = _head_dimensions(args)
    if not args.multi_latent_attention:
        return hidden * (2 * heads + 2 * args.num_query_groups) * query
    from_query = args.q_lora_rank * (hidden + heads * query) if args.q_lora_rank else hidden * heads * query
    keys = args.kv_lora_rank * (hidden + heads * (args.qk_head_dim + value)) + hidden * args.qk_pos_emb_head_dim
    return from_query + keys + heads * value * hidden


def _mlp_weights(args: Any) -> int:
    """Of all layers; of experts, those that a token meets."""
    dense, sparse = args.num_layers, 0
    if args.num_experts:
        frequency = args.moe_layer_freq
        layers = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(args.num_layers)]
        sparse = sum(map(bool, layers))
        dense -= sparse
    experts = (args.moe_ffn_hidden_size or args.ffn_hidden_size) * args.moe_router_topk
    shared = args.moe_shared_expert_intermediate_size or 0
    return 3 * args.hidden_size * (dense * args.ffn_hidden_size + sparse * (experts + shared))
