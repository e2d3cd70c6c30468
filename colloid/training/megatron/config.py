"""Megatron's configuration of the model: its numbers, what the user passes through, and what colloid relies on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from colloid.config.megatron_fields import transformer_fields

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def transformer_config(args: Any) -> TransformerConfig:
    """The configuration of the model that `args` describes, `MLATransformerConfig` if its attention has latents."""
    fields = dict(transformer_fields(args))
    dtype = DTYPES[args.params_dtype]
    on_cpu = args.device == "cpu"
    if on_cpu:
        # Megatron's deterministic mode chooses among CUDA kernels; one thread on a CPU has but one order.
        fields.pop("deterministic_mode", None)
        for fused in ("bias_dropout_fusion", "apply_rope_fusion", "masked_softmax_fusion", "persist_layer_norm"):
            fields[fused] = False
        fields["gradient_accumulation_fusion"] = False
        fields["bias_activation_fusion"] = False
    if args.pipeline_model_parallel_size > 1:
        # Packs differ in length; Megatron allows this with the alltoall dispatcher alone, for dense models too.
        fields |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    return (MLATransformerConfig if args.multi_latent_attention else TransformerConfig)(
        **fields
        | {
            "num_layers": args.num_layers,
            "hidden_size": args.hidden_size,
            "ffn_hidden_size": args.ffn_hidden_size,
            "num_attention_heads": args.num_attention_heads,
            "num_query_groups": args.num_query_groups or args.num_attention_heads,
            "kv_channels": args.kv_channels,
            "layernorm_epsilon": args.norm_epsilon,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "add_qkv_bias": bool(args.add_qkv_bias),
            "qk_layernorm": bool(args.qk_layernorm),
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype is torch.bfloat16,
            "use_cpu_initialization": on_cpu,
            # Every parameter is loaded, and loading checks that.
            "perform_initialization": False,
            # The loss of a micro-batch is its share of the step's loss: nothing may be divided again. With this, and
            # a token count of 0 from the loss function, neither the schedule nor DDP nor finalize_model_grads scales.
            "calculate_per_token_loss": True,
        }
    )
