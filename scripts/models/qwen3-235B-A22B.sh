# Model arguments of qwen3-235B-A22B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen3-235B-A22B}"
    --disable-bias-linear
    --ffn-hidden-size 12288
    --group-query-attention
    --hidden-size 4096
    --kv-channels 128
    --moe-aux-loss-coeff 0
    --moe-ffn-hidden-size 1536
    --moe-grouped-gemm
    --moe-layer-freq "[0]*0+[1]*94"
    --moe-permute-fusion
    --moe-router-dtype fp32
    --moe-router-score-function softmax
    --moe-router-topk 8
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 64
    --num-experts 128
    --num-layers 94
    --num-query-groups 4
    --position-embedding-type rope
    --qk-layernorm
    --rotary-base 1000000
    --rotary-percent 1.0
    --swiglu
    --untie-embeddings-and-output-weights
    --vocab-size 151936
)

CKPT_ARGS=()
