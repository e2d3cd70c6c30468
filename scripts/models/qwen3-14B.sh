# Model arguments of qwen3-14B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen3-14B}"
    --disable-bias-linear
    --ffn-hidden-size 17408
    --group-query-attention
    --hidden-size 5120
    --kv-channels 128
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 40
    --num-layers 40
    --num-query-groups 8
    --qk-layernorm
    --rotary-base 1000000
    --swiglu
    --untie-embeddings-and-output-weights
    --use-rotary-position-embeddings
    --vocab-size 151936
)

CKPT_ARGS=()
