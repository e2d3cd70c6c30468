# Model arguments of glm4-9B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-zai-org/GLM-4-9B-0414}"
    --add-qkv-bias
    --disable-bias-linear
    --ffn-hidden-size 13696
    --group-query-attention
    --hidden-size 4096
    --no-rope-fusion
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 32
    --num-layers 40
    --num-query-groups 2
    --post-mlp-layernorm
    --post-self-attn-layernorm
    --rotary-base 10000
    --rotary-interleaved
    --rotary-percent 0.5
    --swiglu
    --untie-embeddings-and-output-weights
    --use-rotary-position-embeddings
    --vocab-size 151552
)

CKPT_ARGS=()
