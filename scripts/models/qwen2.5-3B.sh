# Model arguments of qwen2.5-3B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen2.5-3B}"
    --add-qkv-bias
    --disable-bias-linear
    --ffn-hidden-size 11008
    --group-query-attention
    --hidden-size 2048
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 16
    --num-layers 36
    --num-query-groups 2
    --rotary-base 1000000
    --swiglu
    --use-rotary-position-embeddings
    --vocab-size 151936
)

CKPT_ARGS=()
