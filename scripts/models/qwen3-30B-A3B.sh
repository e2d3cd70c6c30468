# Model arguments of qwen3-30B-A3B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen3-30B-A3B}"
    --disable-bias-linear
    --ffn-hidden-size 6144
    --group-query-attention
    --hidden-size 2048
    --kv-channels 128
    --moe-aux-loss-coeff 0
    --moe-ffn-hidden-size 768
    --moe-grouped-gemm
    --moe-layer-freq "[0]*0+[1]*48"
    --moe-permute-fusion
    --moe-router-dtype fp32
    --moe-router-score-function softmax
    --moe-router-topk 8
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 32
    --num-experts 128
    --num-layers 48
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
