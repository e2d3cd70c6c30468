# Model arguments of glm4-32B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-zai-org/GLM-4-32B-0414}"
    --disable-bias-linear
    --ffn-hidden-size 23040
    --group-query-attention
    --hidden-size 6144
    --max-position-embeddings 32768
    --no-rope-fusion
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 48
    --num-layers 61
    --num-query-groups 2
    --post-mlp-layernorm
    --post-self-attn-layernorm
    --rotary-base 10000
    --rotary-interleaved
    --rotary-percent 0.5
    --seq-length 32768
    --swiglu
    --untie-embeddings-and-output-weights
    --use-rotary-position-embeddings
    --vocab-size 151552
)

CKPT_ARGS=()
