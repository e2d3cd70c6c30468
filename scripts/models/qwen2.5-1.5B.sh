# Model arguments of qwen2.5-1.5B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen2.5-1.5B}"
    --add-qkv-bias
    --disable-bias-linear
    --ffn-hidden-size 8960
    --group-query-attention
    --hidden-size 1536
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 12
    --num-layers 28
    --num-query-groups 2
    --rotary-base 1000000
    --swiglu
    --use-rotary-position-embeddings
    --vocab-size 151936
)

CKPT_ARGS=()
