# Model arguments of glm4.5-355B-A32B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-zai-org/GLM-4.5}"
    --add-qkv-bias
    --disable-bias-linear
    --ffn-hidden-size 12288
    --group-query-attention
    --hidden-size 5120
    --kv-channels 128
    --moe-aux-loss-coeff 0
    --moe-ffn-hidden-size 1536
    --moe-grouped-gemm
    --moe-layer-freq "[0]*3+[1]*89"
    --moe-permute-fusion
    --moe-router-bias-update-rate 0
    --moe-router-dtype fp32
    --moe-router-enable-expert-bias
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-pre-softmax
    --moe-router-score-function sigmoid
    --moe-router-topk 8
    --moe-router-topk-scaling-factor 2.5
    --moe-shared-expert-intermediate-size 1536
    --moe-token-dispatcher-type alltoall
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 96
    --num-experts 160
    --num-layers 92
    --num-query-groups 8
    --position-embedding-type rope
    --qk-layernorm
    --rotary-base 1000000
    --rotary-percent 0.5
    --swiglu
    --untie-embeddings-and-output-weights
    --vocab-size 151552
)

CKPT_ARGS=()
