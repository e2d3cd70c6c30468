"""What it costs to train a sequence, from the model arguments."""

from __future__ import annotations

from typing import Any

import numpy as np


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
