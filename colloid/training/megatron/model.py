"""The policy as a Megatron GPTModel, from `args`.

Its last stage yields hidden states at the response positions alone: what the loss does not look at is never projected
onto the vocabulary. The head itself is `colloid.training.logprob`.

`T` packed tokens, `R` response tokens, `H` hidden size, `V` vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from colloid.config.megatron import ddp_fields, transformer_fields
from colloid.training.megatron.attention import PackedAttention
from colloid.training.megatron.norm import RMSNorm
from colloid.training.rope import scaled_frequencies
from colloid.weights.hf_loader import NamedParameters
from colloid.weights.names import ModelShape, NameMap

VOCAB_MULTIPLE = 128
"""Megatron's default of --make-vocab-size-divisible-by."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states at chosen positions instead of logits."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packed_seq_params: PackedSeqParams,
        response_positions: torch.Tensor,
    ) -> torch.Tensor:
        """
        Args:
            input_ids: int64 [1, T], the packed sequences.
            position_ids: int64 [1, T], from 0 in each sequence.
            response_positions: int64 [R], the packed positions whose next token is a response token.

        Returns:
            [R, H] on the last pipeline stage; what the next stage takes on the others.
        """
        hidden = super().forward(input_ids, position_ids, None, packed_seq_params=packed_seq_params)
        return hidden.squeeze(1).index_select(0, response_positions) if self.post_process else hidden

    def _postprocess(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden_states

    def head_weight(self) -> torch.Tensor:
        """[V, H] of the output projection; rows from `true_vocab_size` on are padding."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


def transformer_config(args: Any) -> TransformerConfig:
    """Megatron's configuration: the model's numbers, what the user passes through, and what colloid relies on."""
    fields = dict(transformer_fields(args))
    dtype = DTYPES[args.params_dtype]
    on_cpu = args.device == "cpu"
    if on_cpu:
        # Megatron's deterministic mode chooses among CUDA kernels; one thread on a CPU has but one order.
        fields.pop("deterministic_mode", None)
        for fused in ("bias_dropout_fusion", "apply_rope_fusion", "masked_softmax_fusion", "persist_layer_norm"):
            fields[fused] = False
        fields["gradient_accumulation_fusion"] = False
        fields["bias_activation_fusion"] = False
    if args.pipeline_model_parallel_size > 1:
        # Packs differ in length; Megatron allows this with the alltoall dispatcher alone, for dense models too.
        fields |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    return TransformerConfig(
        **fields
        | {
            "num_layers": args.num_layers,
            "hidden_size": args.hidden_size,
            "ffn_hidden_size": args.ffn_hidden_size,
            "num_attention_heads": args.num_attention_heads,
            "num_query_groups": args.num_query_groups or args.num_attention_heads,
            "kv_channels": args.kv_channels,
            "layernorm_epsilon": args.norm_epsilon,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "add_qkv_bias": bool(args.add_qkv_bias),
            "qk_layernorm": bool(args.qk_layernorm),
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype is torch.bfloat16,
            "use_cpu_initialization": on_cpu,
            # Every parameter is loaded, and loading checks that.
            "perform_initialization": False,
            # The loss of a micro-batch is its share of the step's loss: nothing may be divided again. With this, and
            # a token count of 0 from the loss function, neither the schedule nor DDP nor finalize_model_grads scales.
            "calculate_per_token_loss": True,
        }
    )


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel_size: int) -> int:
    """The vocabulary's rows in Megatron: equally many on each tensor-parallel rank."""
    unit = multiple * tensor_parallel_size
    return -(-vocab_size // unit) * unit


def model_shape(args: Any) -> ModelShape:
    """The numbers that the name tables need."""
    multiple = args.make_vocab_size_divisible_by or VOCAB_MULTIPLE
    return ModelShape(
        num_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups or args.num_attention_heads,
        vocab_size=args.vocab_size,
        padded_vocab_size=padded_vocab_size(args.vocab_size, multiple, args.tensor_model_parallel_size),
        tied=not args.untie_embeddings_and_output_weights,
    )


def name_map(args: Any) -> NameMap:
    """Names of the model that `args` describes."""
    return NameMap(args.model_type, model_shape(args))


def build_model(args: Any) -> list[DistributedDataParallel]:
    """This rank's part of the policy (one chunk a virtual pipeline stage), its weights not loaded yet."""
    config = transformer_config(args)
    num_chunks = args.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for chunk in range(num_chunks):
        stage = chunk if num_chunks > 1 else None
        model = _build_chunk(args, config, stage)
        if args.device != "cpu":
            model.cuda()
        wrapped = Float16Module(config, model) if config.bf16 else model
        ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True} | ddp_fields(args))
        chunks.append(DistributedDataParallel(config, ddp, wrapped, disable_bucketing=chunk > 0))
    config.finalize_model_grads_func = finalize_model_grads
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks


def unwrap(chunk: torch.nn.Module) -> PolicyModel:
    """The model inside DDP and the precision wrapper."""
    while not isinstance(chunk, PolicyModel):
        chunk = chunk.module
    return chunk


def named_parameters(chunks: list[DistributedDataParallel]) -> NamedParameters:
    """Parameters of this rank, with layers counted over the whole model."""
    named = []
    for chunk in chunks:
        model = unwrap(chunk)
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                name = f"decoder.layers.{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
            named.append((name, parameter))
    return named


def _build_chunk(args: Any, config: TransformerConfig, stage: int | None) -> PolicyModel:
    shape = model_shape(args)
    single = stage is None
    model = PolicyModel(
        config,
        _block_spec(config, args.device, stage),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings or args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=single, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=single, vp_stage=stage),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        vp_stage=stage,
    )
    model.true_vocab_size = shape.vocab_size
    model.rotary_pos_emb.inv_freq = scaled_frequencies(model.rotary_pos_emb.inv_freq, args.hf_config)
    return model


def _block_spec(config: TransformerConfig, device: str, stage: int | None) -> TransformerBlockSubmodules:
    """Transformer Engine's layers where CUDA is (not run yet); else Megatron's local ones, norm and attention ours."""
    with_engine = device != "cpu"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_engine, normalization="RMSNorm", vp_stage=stage
    )
    return (
        block
        if with_engine
        else replace(block, layer_specs=[_local_layer(spec, config) for spec in block.layer_specs], layer_norm=RMSNorm)
    )


def _local_layer(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    attention = spec.submodules.self_attention
    norms = {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if config.qk_layernorm else {}
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=PackedAttention, **norms))
    submodules = replace(spec.submodules, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, self_attention=attention)
    return replace(spec, submodules=submodules)
