# Model arguments of llama3.2-3B-Instruct; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-meta-llama/Llama-3.2-3B-Instruct}"
    --disable-bias-linear
    --ffn-hidden-size 8192
    --group-query-attention
    --hidden-size 3072
    --kv-channels 128
    --max-position-embeddings 131072
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 24
    --num-layers 28
    --num-query-groups 8
    --rotary-base 500000
    --rotary-scaling-factor 32.0
    --swiglu
    --use-rope-scaling
    --use-rotary-position-embeddings
    --vocab-size 128256
)

CKPT_ARGS=()
