# Model arguments of smollm2-135M; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-${COLLOID_CACHE:-$HOME/.cache/colloid}/smollm2-135M-instruct}"
    --disable-bias-linear
    --ffn-hidden-size 1536
    --group-query-attention
    --hidden-size 576
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 9
    --num-layers 30
    --num-query-groups 3
    --rotary-base 100000
    --swiglu
    --use-rotary-position-embeddings
    --vocab-size 49152
)

CKPT_ARGS=()
