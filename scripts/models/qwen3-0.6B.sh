# Model arguments of qwen3-0.6B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen3-0.6B}"
    --disable-bias-linear
    --ffn-hidden-size 3072
    --group-query-attention
    --hidden-size 1024
    --kv-channels 128
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 16
    --num-layers 28
    --num-query-groups 8
    --qk-layernorm
    --rotary-base 1000000
    --swiglu
    --use-rotary-position-embeddings
    --vocab-size 151936
)

CKPT_ARGS=()
