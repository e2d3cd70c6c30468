# Model arguments of qwen2.5-32B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen2.5-32B}"
    --add-qkv-bias
    --disable-bias-linear
    --ffn-hidden-size 27648
    --group-query-attention
    --hidden-size 5120
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 40
    --num-layers 64
    --num-query-groups 8
    --rotary-base 1000000
    --swiglu
    --untie-embeddings-and-output-weights
    --use-rotary-position-embeddings
    --vocab-size 152064
)

CKPT_ARGS=()
