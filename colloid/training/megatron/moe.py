"""Mixtures of experts: the part of Megatron's configuration that describes the router and the experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from colloid.errors import ConfigError

SCORED_BY = 2
"""A group of experts is scored by the sum of its best so many, in every model with groups."""


def expert_layers(args: Any) -> tuple[bool, ...]:
    """Of each layer: whether it has experts (otherwise it is dense)."""
    if not args.num_experts:
        return (False,) * args.num_layers
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(args.num_layers))
    return tuple(bool(sparse) for sparse in frequency)


def expert_fields(args: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Fields of `TransformerConfig`.

    Args:
        given: fields that the user passes through; what the model does not say of the router stays as it is there.

    Raises:
        ConfigError: a router that Megatron computes otherwise than the model, or an auxiliary loss.
    """
    _check(args, given)
    sigmoid = args.moe_router_score_function == "sigmoid"
    fields = {
        "num_moe_experts": args.num_experts,
        "moe_layer_freq": [int(sparse) for sparse in expert_layers(args)],
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size or None,
        "moe_router_topk": args.moe_router_topk,
        "moe_router_score_function": args.moe_router_score_function,
        # Softmax over all experts, then choose: the weights do not add up to one. Sigmoid scores are always divided.
        "moe_router_pre_softmax": bool(args.moe_router_pre_softmax),
        "moe_router_topk_scaling_factor": args.moe_router_topk_scaling_factor,
        "moe_router_num_groups": args.moe_router_num_groups,
        "moe_router_group_topk": args.moe_router_group_topk,
        "moe_router_enable_expert_bias": sigmoid and bool(args.moe_router_enable_expert_bias),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    # Megatron's own default moves the bias after every step.
    defaults = {"moe_router_bias_update_rate": 0.0, "moe_router_dtype": "fp32", "moe_token_dispatcher_type": "alltoall"}
    fields |= {name: value for name, value in defaults.items() if given.get(name) is None}
    if args.device == "cpu":
        # Kernels of Transformer Engine.
        fields |= {"moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_router_fusion": False}
    return fields


def _check(args: Any, given: dict[str, Any]) -> None:
    coefficients = given.get("moe_aux_loss_coeff") or 0.0
    if any(coefficients if isinstance(coefficients, list) else [coefficients]):
        raise ConfigError(
            f"--moe-aux-loss-coeff {coefficients} is not supported: the auxiliary loss would be weighted against a "
            "loss whose denominators Megatron does not know; leave it at 0"
        )
    groups, chosen = args.moe_router_num_groups or 1, args.moe_router_group_topk or 1
    if groups > 1 and args.moe_router_topk // chosen != SCORED_BY:
        raise ConfigError(
            f"--moe-router-topk {args.moe_router_topk} with --moe-router-group-topk {chosen}: Megatron scores a group "
            f"by its best topk // group-topk = {args.moe_router_topk // chosen} experts, the model by its best "
            f"{SCORED_BY}; only a ratio of {SCORED_BY} is right"
        )
    if args.moe_router_score_function == "sigmoid" and args.moe_router_topk == 1:
        raise ConfigError("--moe-router-topk 1 with sigmoid scores: Megatron does not normalise the score, models do")


def keep_bias_precise(model: torch.nn.Module) -> None:
    """The bias that chooses experts is float32 in every checkpoint; the wrapper for bfloat16 casts it."""
    for _, router in _routers(model):
        router._maintain_float32_expert_bias()


def expert_biases(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The biases that choose experts, by name: buffers, which nothing trains and every checkpoint holds."""
    for name, router in _routers(model):
        if router.expert_bias is not None:
            yield f"{name}.expert_bias", router.expert_bias


def first_expert(config: TransformerConfig) -> int:
    """Number of the first expert of this expert-parallel rank."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * (config.num_moe_experts or 0) // ranks


def _routers(model: torch.nn.Module) -> Iterator[tuple[str, TopKRouter]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, TopKRouter))
