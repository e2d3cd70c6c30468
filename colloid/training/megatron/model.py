"""The policy as a Megatron GPTModel, from `args`.

Its last stage yields hidden states at the response positions alone: what the loss does not look at is never projected
onto the vocabulary. The head itself is `colloid.training.logprob`.

`T` packed tokens, `R` response tokens, `H` hidden size, `V` vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from colloid.config.megatron_fields import ddp_fields
from colloid.errors import HookError
from colloid.hooks import load_hook
from colloid.training.megatron import parallel
from colloid.training.megatron.config import transformer_config
from colloid.training.megatron.freezing import freeze, keep_graph
from colloid.training.megatron.layers import block_spec
from colloid.training.megatron.moe import expert_biases, expert_layers, first_expert, keep_bias_precise
from colloid.training.rope import scaled_frequencies
from colloid.weights.hf_loader import NamedParameters
from colloid.weights.names import ModelShape, NameMap, with_global_expert

VOCAB_MULTIPLE = 128
"""Megatron's default of --make-vocab-size-divisible-by."""


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
        if not (self.post_process and self.config.sequence_parallel):
            return hidden_states
        # The head sums the gradient over the group itself: each rank takes its part of it.
        return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)

    def head_weight(self) -> torch.Tensor:
        """[V, H] of the output projection; rows from `true_vocab_size` on are padding."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


class ValueModel(PolicyModel):
    """The same whose last stage has a value head [1, H], of zeros at the start, in place of the projection onto the
    vocabulary. Tensor-parallel ranks hold the head whole, and compute it on the same hidden states.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        if self.post_process:
            self.output_layer = None
            self.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Megatron's description of this rank's part."""
        # GPTModel's and LanguageModule's add what concerns the projection, and take it to be there.
        return super(LanguageModule, self).sharded_state_dict(*args, **options)


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel_size: int) -> int:
    """The vocabulary's rows in Megatron: equally many on each tensor-parallel rank."""
    unit = multiple * tensor_parallel_size
    return -(-vocab_size // unit) * unit


def model_shape(args: Any) -> ModelShape:
    """The numbers that the name tables need."""
    multiple = args.make_vocab_size_divisible_by or VOCAB_MULTIPLE
    padded = args.padded_vocab_size or padded_vocab_size(args.vocab_size, multiple, args.tensor_model_parallel_size)
    return ModelShape(
        num_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups or args.num_attention_heads,
        vocab_size=args.vocab_size,
        padded_vocab_size=padded,
        tied=not args.untie_embeddings_and_output_weights,
        qkv_bias=bool(args.add_qkv_bias),
        qk_norm=bool(args.qk_layernorm),
        q_lora=bool(args.multi_latent_attention and args.q_lora_rank),
        num_experts=args.num_experts or 0,
        expert_layers=expert_layers(args),
    )


def name_map(args: Any) -> NameMap:
    """Names of the model that `args` describes."""
    return NameMap(args.model_type, model_shape(args))


def build_critic(args: Any) -> list[DistributedDataParallel]:
    """A critic of the policy's family, its weights not loaded yet. It has no projection onto the vocabulary."""
    return build_model(args, ValueModel)


def build_model(args: Any, kind: type[PolicyModel] = PolicyModel) -> list[DistributedDataParallel]:
    """This rank's part of the policy (one chunk a virtual pipeline stage), its weights not loaded yet."""
    config = transformer_config(args)
    ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True} | ddp_fields(args))
    models = build_weights(args, config, kind)
    if args.only_train_params_name_list or args.freeze_params_name_list:
        # Before DDP, which makes gradients of what is trained, and the optimizer, which has states of it.
        freeze_by_options(args, models, kind)
    chunks = [
        DistributedDataParallel(config, ddp, model, disable_bucketing=row > 0) for row, model in enumerate(models)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks


def freeze_by_options(args: Any, models: Sequence[torch.nn.Module], kind: type[PolicyModel]) -> None:
    """Takes `requires_grad` from what is not trained. Of a critic, patterns mean what it has in common with the policy:
    the value head is trained always. Collective over all ranks.

    Raises:
        ConfigError: see `freeze`. The same on all ranks.
    """
    freeze(
        without_value_head(named_parameters(models)),
        name_map(args),
        args.only_train_params_name_list,
        args.freeze_params_name_list,
        over_ranks=parallel.gather_objects,
        # What is to be found, and left to train, the policy's ranks say.
        checks=kind is not ValueModel,
    )
    for model in map(unwrap, models):
        if model.config.recompute_granularity:
            keep_graph(model)


def build_weights(args: Any, config: TransformerConfig, kind: type[PolicyModel] = PolicyModel) -> list[torch.nn.Module]:
    """The same without what training needs: parameters alone, no buffer of gradients."""
    num_chunks = args.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for chunk in range(num_chunks):
        model = _build_chunk(args, config, chunk if num_chunks > 1 else None, kind)
        if args.device != "cpu":
            model.cuda()
        chunks.append(Float16Module(config, model) if config.bf16 else model)
        keep_bias_precise(model)
    return chunks


def unwrap(chunk: torch.nn.Module) -> PolicyModel:
    """The model inside DDP and the precision wrapper."""
    while not isinstance(chunk, PolicyModel):
        chunk = chunk.module
    return chunk


def named_parameters(chunks: Sequence[torch.nn.Module]) -> NamedParameters:
    """Parameters of this rank and the buffers that belong to a checkpoint, with layers and experts counted over the
    whole model.
    """
    named = []
    for chunk in chunks:
        model = unwrap(chunk)
        for name, parameter in [*model.named_parameters(), *expert_biases(model)]:
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                name = f"decoder.layers.{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
                name = with_global_expert(name, first_expert(model.config))
            named.append((name, parameter))
    return named


def without_value_head(parameters: NamedParameters) -> NamedParameters:
    """Those that a critic has in common with the policy, which have a name in Hugging Face's checkpoints."""
    return [(name, parameter) for name, parameter in parameters if not name.startswith("value_head.")]


def _build_chunk(args: Any, config: TransformerConfig, stage: int | None, kind: type[PolicyModel]) -> PolicyModel:
    shape = model_shape(args)
    single = stage is None
    pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=single, vp_stage=stage)
    post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=single, vp_stage=stage)

    def build() -> PolicyModel:
        return kind(
            config,
            block_spec(args, config, stage),
            vocab_size=shape.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings or args.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            # A critic has no projection that could be the embedding.
            share_embeddings_and_output_weights=shape.tied and kind is not ValueModel,
            position_embedding_type="rope",
            rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent,
            vp_stage=stage,
        )

    if args.custom_model_provider_path and kind is PolicyModel:
        hook = load_hook(args.custom_model_provider_path, "model_provider")
        given = {"vp_stage": stage, "args": args, "config": config, "build": build}
        model = as_policy(hook(pre_process, post_process, **given), hook.name)
    else:
        model = build()
    model.true_vocab_size = shape.vocab_size
    if not config.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = scaled_frequencies(model.rotary_pos_emb.inv_freq, args.hf_config)
    return model


def as_policy(model: Any, provider: str) -> PolicyModel:
    """A model that a user's provider built, with what the trainer needs of it.

    Args:
        provider: named in errors.

    Raises:
        HookError: it is no GPTModel.
    """
    if isinstance(model, PolicyModel):
        return model
    if not isinstance(model, GPTModel):
        raise HookError(f"{provider} must return Megatron's GPTModel or a subclass, not {type(model).__name__}")
    # Behind PolicyModel in the order of classes, so that its forward goes on to that of the user's class.
    model.__class__ = type(f"Policy{type(model).__name__}", (PolicyModel, type(model)), {})
    return model
