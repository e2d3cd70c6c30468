"""Qwen3, dense: Llama with a norm over each query head and each key head."""

from colloid.weights.names import llama
from colloid.weights.names.table import SAME, Entry

QK_NORMS = [
    Entry(
        (llama.HF_LAYER + f"self_attn.{x}_norm.weight",), (llama.LAYER + f"self_attention.{x}_layernorm.weight",), SAME
    )
    for x in "qk"
]

TABLE = [llama.EMBEDDING, *llama.ATTENTION, *QK_NORMS, llama.MLP_NORM, *llama.MLP, llama.FINAL_NORM, llama.HEAD]
