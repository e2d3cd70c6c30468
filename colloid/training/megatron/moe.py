"""Mixtures of experts: which layers have them, which are on this rank, and the bias that chooses among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig


def expert_layers(args: Any) -> tuple[bool, ...]:
    """Of each layer: whether it has experts (otherwise it is dense)."""
    if not args.num_experts:
        return (False,) * args.num_layers
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(args.num_layers))
    return tuple(bool(sparse) for sparse in frequency)


def keep_bias_precise(model: torch.nn.Module) -> None:
    """The bias that chooses experts is float32 in every checkpoint; the wrapper for bfloat16 casts it."""
    for _, router in routers(model):
        router._maintain_float32_expert_bias()


def expert_biases(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The biases that choose experts, by name: buffers, which nothing trains and every checkpoint holds."""
    for name, router in routers(model):
        if router.expert_bias is not None:
            yield f"{name}.expert_bias", router.expert_bias


def first_expert(config: TransformerConfig) -> int:
    """Number of the first expert of this expert-parallel rank."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * (config.num_moe_experts or 0) // ranks


def routers(model: torch.nn.Module) -> Iterator[tuple[str, TopKRouter]]:
    """Those of this rank, by name of the module, in the order of the layers."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, TopKRouter))
