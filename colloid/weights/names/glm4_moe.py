"""GLM-4.5, 4.6 and 4.7 (Glm4Moe): Llama's attention with a bias and norms by config, and experts as DeepSeek-V3."""

from dataclasses import replace

from colloid.weights.names import llama
from colloid.weights.names.experts import SIGMOID_MOE
from colloid.weights.names.glm4 import OPTIONAL_BIAS
from colloid.weights.names.qwen3 import QK_NORMS

OPTIONAL_NORMS = [replace(entry, present=lambda shape, layer: shape.qk_norm) for entry in QK_NORMS]

TABLE = [
    llama.EMBEDDING,
    *llama.ATTENTION,
    OPTIONAL_BIAS,
    *OPTIONAL_NORMS,
    *SIGMOID_MOE,
    llama.FINAL_NORM,
    llama.HEAD,
]
