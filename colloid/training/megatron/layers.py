"""The layers of a pipeline stage, as Megatron's specs: Transformer Engine's where CUDA is (not run yet); else its local
ones, with norms, attention over packs and latent attention of our own.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from colloid.training.megatron.attention import PackedAttention
from colloid.training.megatron.glm4 import PostNormLayer
from colloid.training.megatron.mla import LatentAttention
from colloid.training.megatron.norm import LatentNorm, RMSNorm


def block_spec(args: Any, config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """
    Args:
        stage: virtual pipeline stage, None without virtual stages.
    """
    with_engine = args.device != "cpu"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_engine, normalization="RMSNorm", vp_stage=stage
    )
    norm = block.layer_norm if with_engine else RMSNorm
    layers = block.layer_specs if with_engine else [_local_layer(spec, config) for spec in block.layer_specs]
    if args.post_self_attn_layernorm or args.post_mlp_layernorm:
        layers = [replace(spec, module=PostNormLayer, params=spec.params | {"post_norm": norm}) for spec in layers]
    return replace(block, layer_specs=layers, layer_norm=norm)


def _local_layer(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    attention = spec.submodules.self_attention
    latent = config.multi_latent_attention
    present = {field.name for field in fields(attention.submodules)}
    norms = {
        name: LatentNorm if latent else RMSNorm
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm")
        if name in present and getattr(attention.submodules, name) not in (None, IdentityOp)
    }
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=PackedAttention, **norms))
    if latent:
        attention = replace(attention, module=LatentAttention)
    submodules = replace(spec.submodules, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, self_attention=attention)
    return replace(spec, submodules=submodules)
