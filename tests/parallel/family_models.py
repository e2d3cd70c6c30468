"""Tiny random models of transformers' own classes, one a family that the trainer knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB, LAYERS = 96, 4
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    "attn_implementation": "eager",
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
HALF_ROPE = PLAIN_ROPE | {"partial_rotary_factor": 0.5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
QWEN3_EXPERTS = {
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "rope_parameters": PLAIN_ROPE,
}
SIGMOID_EXPERTS = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK = SIGMOID_EXPERTS | LATENTS | {"rope_parameters": YARN}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": PLAIN_ROPE}),
    "qwen3_moe": ("Qwen3Moe", QWEN3_EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe, weights not normalised": ("Qwen3Moe", QWEN3_EXPERTS | {"norm_topk_prob": False}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True, "rope_parameters": HALF_ROPE}),
    "glm4 without bias": ("Glm4", {"head_dim": 16, "attention_bias": False, "rope_parameters": HALF_ROPE}),
    "glm4_moe": (
        "Glm4Moe",
        SIGMOID_EXPERTS | {"head_dim": 16, "attention_bias": True, "use_qk_norm": True, "rope_parameters": HALF_ROPE},
    ),
    "glm4_moe without norms": (
        "Glm4Moe",
        SIGMOID_EXPERTS | {"head_dim": 16, "attention_bias": True, "use_qk_norm": False, "rope_parameters": HALF_ROPE},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        DEEPSEEK | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    ),
    "kimi_k2": (
        "DeepseekV3",
        DEEPSEEK | {"rope_parameters": YARN | {"rope_theta": 5e4, "factor": 32.0, "beta_fast": 1.0}},
    ),
    "moonlight": (
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2, "rms_norm_eps": 1e-5, "rope_parameters": PLAIN_ROPE},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", SIGMOID_EXPERTS | LATENTS | {"v_head_dim": 28, "rope_parameters": PLAIN_ROPE}),
}
"""Name -> (prefix of transformers' classes, what its config has besides `BASE`)."""

EXPERTS = [name for name, (_, options) in FAMILIES.items() if "moe_intermediate_size" in options]
"""Those with experts."""


def make_family(path: Path, name: str, seed: int = 0, **changed: Any) -> Path:
    """Writes a float32 model of the family to `path`; returns it. Nothing in it is trivial: norms, biases, router."""
    import torch
    import transformers

    prefix, options = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**BASE | options | changed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
        with torch.no_grad():
            for key, value in [*model.named_parameters(), *model.named_buffers()]:
                if "norm" in key or key.endswith("bias"):
                    value.add_(0.1 * torch.randn(value.shape))
                elif key.endswith("gate.weight"):
                    value.normal_(0, 0.3)
    model.save_pretrained(path)
    if name == "kimi_k2":
        # Its own model type; transformers has the class under DeepSeek's name alone.
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2"}))
    return path


def hf_model(path: Path) -> Any:
    """The model in float32, as transformers loads it."""
    import transformers

    config = json.loads((path / "config.json").read_text())
    name = config["architectures"][0]
    loader: Callable[..., Any] = getattr(transformers, name)
    given = {"config": loader.config_class(**config | {"model_type": "deepseek_v3"})}
    return loader.from_pretrained(
        path, attn_implementation="eager", dtype="float32", **given if config["model_type"] == "kimi_k2" else {}
    ).eval()
