# Model arguments of llama3-70B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-meta-llama/Meta-Llama-3-70B}"
    --disable-bias-linear
    --ffn-hidden-size 28672
    --group-query-attention
    --hidden-size 8192
    --kv-channels 128
    --max-position-embeddings 8192
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 64
    --num-layers 80
    --num-query-groups 8
    --rotary-base 500000
    --swiglu
    --untie-embeddings-and-output-weights
    --use-rotary-position-embeddings
    --vocab-size 128256
)

CKPT_ARGS=()
