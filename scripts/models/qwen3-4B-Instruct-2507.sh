# Model arguments of qwen3-4B-Instruct-2507; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen3-4B-Instruct-2507}"
    --disable-bias-linear
    --ffn-hidden-size 9728
    --group-query-attention
    --hidden-size 2560
    --kv-channels 128
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 32
    --num-layers 36
    --num-query-groups 8
    --qk-layernorm
    --rotary-base 5000000
    --swiglu
    --use-rotary-position-embeddings
    --vocab-size 151936
)

CKPT_ARGS=()
