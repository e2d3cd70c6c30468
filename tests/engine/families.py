"""Tiny random models of the families with experts, latent attention or further norms, made with transformers."""

from pathlib import Path

import torch
import transformers as tf

BASE = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GROUPED = {**BASE, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 3}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
LATENT = {
    **BASE,
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN,
}
QWEN3_MOE = {**GROUPED, **EXPERTS, "num_experts": 8, "rope_parameters": PLAIN}
GLM4_MOE = {
    **GROUPED,
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "rope_parameters": HALF_ROTATED,
}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
KIMI_ROPE = {**YARN, "beta_fast": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0}
MOONLIGHT = {"q_lora_rank": None, "n_shared_experts": 2, "rms_norm_eps": 1e-5, "rope_parameters": PLAIN}
# name: (model class, config class, arguments)
FAMILIES = {
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3-moe-unnormalized": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "glm4": ("Glm4", {**GROUPED, "attention_bias": True, "rope_parameters": HALF_ROTATED}),
    "glm4.5": ("Glm4Moe", {**GLM4_MOE, "attention_bias": True, "use_qk_norm": True}),
    "glm4.5-air": (
        "Glm4Moe",
        {**GLM4_MOE, "attention_bias": True, "use_qk_norm": False, "n_group": 2, "topk_group": 1},
    ),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}),
    "deepseek-v3-halves": ("DeepseekV3", {**LATENT, **NO_GROUPS, "rope_interleave": False, "attention_bias": True}),
    "kimi-k2": ("DeepseekV3", {**LATENT, **NO_GROUPS, "rope_parameters": KIMI_ROPE}),
    "moonlight": ("DeepseekV3", {**LATENT, **NO_GROUPS, **MOONLIGHT}),
    "glm4.7-flash": ("Glm4MoeLite", {**LATENT, **NO_GROUPS, "v_head_dim": 28, "rope_parameters": PLAIN}),
}


def make_family(name: str, directory: Path) -> Path:
    """Saves a random float32 model; nothing trivial is left of what HF initializes to zero or one."""
    torch.manual_seed(0)
    kind, arguments = FAMILIES[name]
    arguments = {k: v for k, v in arguments.items() if not (kind == "Glm4MoeLite" and k == "first_k_dense_replace")}
    config = getattr(tf, f"{kind}Config")(**arguments)
    model = getattr(tf, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "rotary" in tensor_name:
                continue
            # Latents are made small, so that the epsilon of their norms counts.
            kind = ".".join(tensor_name.split(".")[-2:])
            tensor.normal_(0, {"gate.weight": 0.3, "kv_a_proj_with_mqa.weight": 1e-3}.get(kind, 0.1))
            if "norm" in tensor_name:
                tensor.add_(1.0)
    model.save_pretrained(directory)
    return directory
