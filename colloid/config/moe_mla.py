"""Megatron's options for mixtures of experts, latent attention (MLA) and what else the families need."""

from __future__ import annotations

DEFAULTS = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "rope_type": None,
    "rotary_scaling_factor": None,
    "kv_lora_rank": None,
    "qk_head_dim": None,
    "qk_pos_emb_head_dim": None,
    "v_head_dim": None,
}
"""Where colloid's default is not Megatron's: RL balances no load and moves no router's bias, as the engines' routers
would not follow, and what a model is follows from its `config.json`."""

USED: dict[str, tuple | None] = {
    "num_experts": None,
    "moe_layer_freq": None,
    "post_self_attn_layernorm": None,
    "post_mlp_layernorm": None,
    "spec": None,
    "seq_length": None,
    # With a coefficient of 0 none of these three does anything.
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.0,),
    "moe_router_bias_update_rate": (0.0,),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "moe_token_drop_policy": None,
}
"""As in `megatron.USED`. (No capacity factor works, so no token is dropped, whatever the policy.)"""

NOT_ON_CPU = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap")
"""Options that change how experts are computed, not what: switched off on CPU."""

PASSED_ON = frozenset(
    [
        *NOT_ON_CPU,
        "beta_fast",
        "beta_slow",
        "kv_lora_rank",
        "moe_ffn_hidden_size",
        "moe_router_dtype",
        "moe_router_enable_expert_bias",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size",
        "mscale",
        "mscale_all_dim",
        "multi_latent_attention",
        "original_max_position_embeddings",
        "q_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "rope_type",
        "rotary_interleaved",
        "v_head_dim",
    ]
)
"""As in `megatron.PASSED_ON`."""

SINGLE = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
"""Options that take several values in Megatron-LM, and one here."""
