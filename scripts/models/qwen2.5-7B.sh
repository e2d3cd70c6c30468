# Model arguments of qwen2.5-7B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen2.5-7B}"
    --add-qkv-bias
    --disable-bias-linear
    --ffn-hidden-size 18944
    --group-query-attention
    --hidden-size 3584
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 28
    --num-layers 28
    --num-query-groups 4
    --rotary-base 1000000
    --swiglu
    --untie-embeddings-and-output-weights
    --use-rotary-position-embeddings
    --vocab-size 152064
)

CKPT_ARGS=()
