# Model arguments of moonlight; `source` it, then `python train.py … ${MODEL_ARGS[@]} ${CKPT_ARGS[@]}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${HF_CHECKPOINT:-moonshotai/Moonlight-16B-A3B}"
    --attention-softmax-in-fp32
    --disable-bias-linear
    --ffn-hidden-size 11264
    --hidden-size 2048
    --kv-channels 128
    --kv-lora-rank 512
    --moe-aux-loss-coeff 0
    --moe-ffn-hidden-size 1408
    --moe-grouped-gemm
    --moe-layer-freq "[0]*1+[1]*26"
    --moe-permute-fusion
    --moe-router-bias-update-rate 0
    --moe-router-dtype fp32
    --moe-router-enable-expert-bias
    --moe-router-group-topk 1
    --moe-router-load-balancing-type seq_aux_loss
    --moe-router-num-groups 1
    --moe-router-pre-softmax
    --moe-router-score-function sigmoid
    --moe-router-topk 6
    --moe-router-topk-scaling-factor 2.446
    --moe-shared-expert-intermediate-size 2816
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --mscale 1.0
    --mscale-all-dim 1.0
    --multi-latent-attention
    --no-masked-softmax-fusion
    --no-rope-fusion
    --norm-epsilon 1e-5
    --normalization RMSNorm
    --num-attention-heads 16
    --num-experts 64
    --num-layers 27
    --position-embedding-type rope
    --qk-head-dim 128
    --qk-layernorm
    --qk-pos-emb-head-dim 64
    --rotary-base 50000
    --rotary-percent 1.0
    --rotary-scaling-factor 1
    --swiglu
    --untie-embeddings-and-output-weights
    --v-head-dim 128
    --vocab-size 163840
)

CKPT_ARGS=()
