"""DeepSeek-V3 and R1, Moonlight, Kimi K2, GLM-4.7-Flash: latent attention, experts with a shared one, a bias that
chooses among them.
"""

from colloid.weights.names import llama
from colloid.weights.names.experts import SIGMOID_MOE
from colloid.weights.names.llama import HF_LAYER, LAYER
from colloid.weights.names.table import SAME, Entry, ModelShape, Shard

HF_ATTENTION = HF_LAYER + "self_attn."
ATTENTION = LAYER + "self_attention."


def _latent_queries(shape: ModelShape, layer: int) -> bool:
    return shape.q_lora


def _plain_queries(shape: ModelShape, layer: int) -> bool:
    return not shape.q_lora


LATENT_ATTENTION = [
    # Not fused with a linear layer in either spec: queries and latents read its output.
    Entry((HF_LAYER + "input_layernorm.weight",), (LAYER + "input_layernorm.weight",), SAME),
    Entry(
        (HF_ATTENTION + "q_proj.weight",),
        (ATTENTION + "linear_q_proj.weight",),
        SAME,
        Shard.ROWS,
        present=_plain_queries,
    ),
    Entry(
        (HF_ATTENTION + "q_a_proj.weight",),
        (ATTENTION + "linear_q_down_proj.weight",),
        SAME,
        present=_latent_queries,
    ),
    Entry(
        (HF_ATTENTION + "q_a_layernorm.weight",),
        (ATTENTION + "q_layernorm.weight", ATTENTION + "linear_q_up_proj.layer_norm_weight"),
        SAME,
        present=_latent_queries,
    ),
    Entry(
        (HF_ATTENTION + "q_b_proj.weight",),
        (ATTENTION + "linear_q_up_proj.weight",),
        SAME,
        Shard.ROWS,
        present=_latent_queries,
    ),
    Entry((HF_ATTENTION + "kv_a_proj_with_mqa.weight",), (ATTENTION + "linear_kv_down_proj.weight",), SAME),
    Entry(
        (HF_ATTENTION + "kv_a_layernorm.weight",),
        (ATTENTION + "kv_layernorm.weight", ATTENTION + "linear_kv_up_proj.layer_norm_weight"),
        SAME,
    ),
    Entry((HF_ATTENTION + "kv_b_proj.weight",), (ATTENTION + "linear_kv_up_proj.weight",), SAME, Shard.ROWS),
    Entry((HF_ATTENTION + "o_proj.weight",), (ATTENTION + "linear_proj.weight",), SAME, Shard.COLUMNS),
]

TABLE = [llama.EMBEDDING, *LATENT_ATTENTION, *SIGMOID_MOE, llama.FINAL_NORM, llama.HEAD]
