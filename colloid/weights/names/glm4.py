"""GLM-4 and GLM-Z1: gate and up in one tensor, and norms after attention and MLP. A bias by config."""

from dataclasses import replace

from colloid.weights.names import llama
from colloid.weights.names.qwen2 import QKV_BIAS
from colloid.weights.names.table import SAME, Entry, Shard

OPTIONAL_BIAS = replace(QKV_BIAS, present=lambda shape, layer: shape.qkv_bias)
POST_NORMS = [
    Entry((llama.HF_LAYER + name,), (llama.LAYER + name,), SAME)
    for name in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
]
GATE_UP = Entry(
    (llama.HF_LAYER + "mlp.gate_up_proj.weight",), (llama.LAYER + "mlp.linear_fc1.weight",), SAME, Shard.GATED_ROWS
)

TABLE = [
    llama.EMBEDDING,
    *llama.ATTENTION,
    OPTIONAL_BIAS,
    llama.MLP_NORM,
    GATE_UP,
    llama.DOWN,
    *POST_NORMS,
    llama.FINAL_NORM,
    llama.HEAD,
]
