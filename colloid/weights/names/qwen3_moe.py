"""Qwen3-MoE: Qwen3 with experts."""

from colloid.weights.names import llama
from colloid.weights.names.experts import SOFTMAX_MOE
from colloid.weights.names.qwen3 import QK_NORMS

TABLE = [llama.EMBEDDING, *llama.ATTENTION, *QK_NORMS, *SOFTMAX_MOE, llama.FINAL_NORM, llama.HEAD]
