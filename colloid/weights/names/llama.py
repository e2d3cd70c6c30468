"""Llama 2 and 3, SmolLM2: the base that the other dense families add to."""

from colloid.weights.names.table import GATE_UP, QKV, SAME, VOCAB, Entry, Shard

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."

EMBEDDING = Entry(("model.embed_tokens.weight",), ("embedding.word_embeddings.weight",), VOCAB, Shard.ROWS)
HEAD = Entry(("lm_head.weight",), ("output_layer.weight",), VOCAB, Shard.ROWS)
FINAL_NORM = Entry(("model.norm.weight",), ("decoder.final_layernorm.weight",), SAME)

ATTENTION = [
    Entry(
        (HF_LAYER + "input_layernorm.weight",),
        (LAYER + "input_layernorm.weight", LAYER + "self_attention.linear_qkv.layer_norm_weight"),
        SAME,
    ),
    Entry(
        tuple(HF_LAYER + f"self_attn.{x}_proj.weight" for x in "qkv"),
        (LAYER + "self_attention.linear_qkv.weight",),
        QKV,
        Shard.ROWS,
    ),
    Entry((HF_LAYER + "self_attn.o_proj.weight",), (LAYER + "self_attention.linear_proj.weight",), SAME, Shard.COLUMNS),
]
MLP_NORM = Entry(
    (HF_LAYER + "post_attention_layernorm.weight",),
    (LAYER + "pre_mlp_layernorm.weight", LAYER + "mlp.linear_fc1.layer_norm_weight"),
    SAME,
)
DOWN = Entry((HF_LAYER + "mlp.down_proj.weight",), (LAYER + "mlp.linear_fc2.weight",), SAME, Shard.COLUMNS)
MLP = [
    Entry(
        (HF_LAYER + "mlp.gate_proj.weight", HF_LAYER + "mlp.up_proj.weight"),
        (LAYER + "mlp.linear_fc1.weight",),
        GATE_UP,
        Shard.GATED_ROWS,
    ),
    DOWN,
]

TABLE = [EMBEDDING, *ATTENTION, MLP_NORM, *MLP, FINAL_NORM, HEAD]
