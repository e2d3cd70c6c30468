"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values."""

from colloid.weights.names import llama
from colloid.weights.names.table import QKV, Entry, Shard

QKV_BIAS = Entry(
    tuple(llama.HF_LAYER + f"self_attn.{x}_proj.bias" for x in "qkv"),
    (llama.LAYER + "self_attention.linear_qkv.bias",),
    QKV,
    Shard.ROWS,
)

TABLE = [llama.EMBEDDING, *llama.ATTENTION, QKV_BIAS, llama.MLP_NORM, *llama.MLP, llama.FINAL_NORM, llama.HEAD]
