# Model arguments of glm4.7-30B-A3B; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-zai-org/GLM-4.7-Flash}"
    --add-qkv-bias
    --disable-bias-linear
    --ffn-hidden-size 10240
    --hidden-size 2048
    --kv-channels 192
    --kv-lora-rank 512
    --make-vocab-size-divisible-by 64
    --moe-aux-loss-coeff 0
    --moe-ffn-hidden-size 1536
    --moe-grouped-gemm
    --moe-layer-freq "[0]*1+[1]*46"
    --moe-permute-fusion
    --moe-router-bias-update-rate 0
    --moe-router-dtype fp32
    --moe-router-enable-expert-bias
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-pre-softmax
    --moe-router-score-function sigmoid
    --moe-router-topk 4
    --moe-router-topk-scaling-factor 1.8
    --moe-shared-expert-intermediate-size 1536
    --moe-token-dispatcher-type alltoall
    --multi-latent-attention
    --no-position-embedding
    --no-rope-fusion
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 20
    --num-experts 64
    --num-layers 47
    --position-embedding-type rope
    --q-lora-rank 768
    --qk-head-dim 192
    --qk-layernorm
    --qk-pos-emb-head-dim 64
    --rotary-base 1000000
    --swiglu
    --untie-embeddings-and-output-weights
    --v-head-dim 256
    --vocab-size 154880
)

CKPT_ARGS=()
