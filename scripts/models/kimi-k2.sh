# Model arguments of kimi-k2; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-moonshotai/Kimi-K2-Instruct}"
    --attention-softmax-in-fp32
    --disable-bias-linear
    --ffn-hidden-size 18432
    --hidden-size 7168
    --kv-channels 64
    --kv-lora-rank 512
    --moe-aux-loss-coeff 0
    --moe-ffn-hidden-size 2048
    --moe-grouped-gemm
    --moe-layer-freq "[0]*1+[1]*60"
    --moe-permute-fusion
    --moe-router-bias-update-rate 0
    --moe-router-dtype fp32
    --moe-router-enable-expert-bias
    --moe-router-group-topk 1
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-num-groups 1
    --moe-router-pre-softmax
    --moe-router-score-function sigmoid
    --moe-router-topk 8
    --moe-router-topk-scaling-factor 2.827
    --moe-shared-expert-intermediate-size 2048
    --moe-token-dispatcher-type alltoall
    --mscale 1.0
    --mscale-all-dim 1.0
    --multi-latent-attention
    --no-rope-fusion
    --norm-epsilon 1e-6
    --normalization RMSNorm
    --num-attention-heads 64
    --num-experts 384
    --num-layers 61
    --position-embedding-type rope
    --q-lora-rank 1536
    --qk-head-dim 128
    --qk-layernorm
    --qk-pos-emb-head-dim 64
    --rotary-base 50000
    --rotary-scaling-factor 32.0
    --swiglu
    --untie-embeddings-and-output-weights
    --v-head-dim 128
    --vocab-size 163840
)

CKPT_ARGS=()
