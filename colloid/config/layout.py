"""How the trainer's ranks are divided: what follows from the options, and what does not divide or is known to be wrong.

Megatron's order of ranks, from the fastest: tensor, context, data, pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from colloid.config.args import Args

Rule = Callable[[Args], "str | None"]

_VIRTUAL_STAGES = {
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
    "virtual_pipeline_model_parallel_size": "--virtual-pipeline-model-parallel-size",
}
_UNEVEN_ENDS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""Megatron-LM's option -> Megatron-Core's field, which is an option as well."""


def model_parallel_size(args: Args) -> int:
    """Ranks that hold one copy of the model's sequence: tensor × pipeline × context."""
    return args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size


def least_ranks(args: Args) -> int:
    """The fewest trainer ranks that the sizes of the layout divide, those of the experts too."""
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = expert_tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    return math.lcm(model_parallel_size(args), experts if args.expert_model_parallel_size > 1 else 1)


def data_parallel_size(args: Args) -> int:
    """Into how many parts a batch is split."""
    return args.world_size // model_parallel_size(args)


def data_parallel_rank(args: Args, rank: int) -> int:
    """Which part of a batch trainer rank `rank` gets."""
    return rank // (args.tensor_model_parallel_size * args.context_parallel_size) % data_parallel_size(args)


def resolve_layout(args: Args) -> None:
    """Sets the number of virtual pipeline stages and the layers of the first and last stage.

    What cannot be divided is left open, for the rules.
    """
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        args.warnings.append("--sequence-parallel has no effect with --tensor-model-parallel-size 1")
        args.sequence_parallel = False
    stages = args.num_virtual_stages_per_pipeline_rank
    per_stage, layers = args.num_layers_per_virtual_pipeline_stage, args.num_layers or 0
    if per_stage and layers % (per_stage * args.pipeline_model_parallel_size) == 0:
        stages = layers // args.pipeline_model_parallel_size // per_stage
    derived = {"virtual_pipeline_model_parallel_size": stages} if stages and stages > 1 else {}
    for option, field in _UNEVEN_ENDS.items():
        if getattr(args, option) is not None:
            derived[field] = getattr(args, option)
    if derived:
        args.derive(derived)
    if args.virtual_pipeline_model_parallel_size == 1:
        args.virtual_pipeline_model_parallel_size = None


def _model_parallel(args: Args) -> str | None:
    size = model_parallel_size(args)
    if args.world_size % size:
        return (
            f"{args.actor_num_nodes} nodes × {args.actor_num_gpus_per_node} = {args.world_size} trainer ranks are no "
            f"multiple of tensor {args.tensor_model_parallel_size} × pipeline {args.pipeline_model_parallel_size} × "
            f"context {args.context_parallel_size} = {size}"
        )
    return None


def _data_parallel(args: Args) -> str | None:
    size = data_parallel_size(args)
    if args.global_batch_size < size:
        return (
            f"--global-batch-size {args.global_batch_size} is less than the {size} data-parallel ranks "
            f"({args.actor_num_nodes} × {args.actor_num_gpus_per_node} = {args.world_size} trainer ranks / "
            f"{model_parallel_size(args)}): some would be idle"
        )
    return None


def _heads(args: Args) -> str | None:
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads and groups and heads % groups:
        return f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}"
    return None


def _tensor(args: Args) -> str | None:
    size = args.tensor_model_parallel_size
    numbers = {"attention heads": args.num_attention_heads}
    if not args.multi_latent_attention:
        numbers["query groups"] = args.num_query_groups
    if not args.num_experts or not _all_layers_have_experts(args):
        numbers["units of the feed-forward layer (ffn_hidden_size)"] = args.ffn_hidden_size
    if args.num_experts:
        numbers["units of the shared experts"] = args.moe_shared_expert_intermediate_size
    return _indivisible(numbers, "--tensor-model-parallel-size", size)


def _all_layers_have_experts(args: Args) -> bool:
    frequency = args.moe_layer_freq
    return frequency == 1 if isinstance(frequency, int) else all(frequency)


def _indivisible(numbers: dict[str, int | None], option: str, size: int) -> str | None:
    wrong = [f"{number} {what}" for what, number in numbers.items() if number and number % size]
    return f"{option} {size} does not divide the model's {' nor its '.join(wrong)}" if wrong else None


def _pipeline(args: Args) -> str | None:
    size, layers = args.pipeline_model_parallel_size, args.num_layers
    ends = [getattr(args, field) for field in _UNEVEN_ENDS.values()]
    ends = [end for end in ends if end is not None]
    if ends and size == 1:
        return "uneven first or last pipeline stages need --pipeline-model-parallel-size above 1"
    if not layers or size == 1:
        return None
    if ends:
        left, stages = layers - sum(ends), size - len(ends)
        if left < 0 or (left % stages if stages else left):
            return (
                f"{layers} layers less the {' and '.join(map(str, ends))} of the first or last pipeline stage = {left} "
                f"cannot be divided among the other {stages} of --pipeline-model-parallel-size {size}"
            )
        return None
    if layers % size:
        return (
            f"--pipeline-model-parallel-size {size} does not divide the model's {layers} layers; "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers make stages uneven"
        )
    return None


def _virtual_pipeline(args: Args) -> str | None:
    given = [flag for dest, flag in _VIRTUAL_STAGES.items() if dest in args.given]
    if len(given) > 1:
        return f"{' and '.join(given)} say the same: leave one out"
    pipeline, layers = args.pipeline_model_parallel_size, args.num_layers
    per_stage, virtual = args.num_layers_per_virtual_pipeline_stage, args.virtual_pipeline_model_parallel_size
    if per_stage and layers and layers % (per_stage * pipeline):
        return (
            f"{given[0]} {per_stage} × --pipeline-model-parallel-size {pipeline} = {per_stage * pipeline} does not "
            f"divide the model's {layers} layers"
        )
    if not virtual:
        return None
    name = given[0] if given else "a virtual pipeline"
    if pipeline == 1:
        return f"{name} needs --pipeline-model-parallel-size above 1"
    if any(getattr(args, field) is not None for field in _UNEVEN_ENDS.values()):
        return f"{name} cannot be combined with uneven pipeline stages"
    if layers and layers % (pipeline * virtual):
        return (
            f"{pipeline} pipeline stages × {virtual} virtual ones = {pipeline * virtual} do not divide the model's "
            f"{layers} layers"
        )
    if pipeline == 2 and not args.overlap_p2p_comm:
        return (
            f"--no-overlap-p2p-communication with {name} and --pipeline-model-parallel-size 2: Megatron mixes up the "
            "messages of the two ranks, and gradients are wrong without an error; leave it out"
        )
    group = args.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and group < pipeline:
        return (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than "
            f"--pipeline-model-parallel-size {pipeline}"
        )
    return None


def _experts(args: Args) -> str | None:
    experts, expert_size = args.num_experts, args.expert_model_parallel_size
    tensor, expert_tensor = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    if not experts:
        # Without a model on this machine its arguments may be incomplete.
        if expert_size > 1 and args.hf_config:
            return f"--expert-model-parallel-size {expert_size}: the model has no experts"
        return None
    if experts % expert_size:
        return f"--expert-model-parallel-size {expert_size} does not divide the model's {experts} experts"
    slices = expert_tensor or tensor
    if text := _indivisible({"units of an expert": args.moe_ffn_hidden_size}, "--expert-tensor-parallel-size", slices):
        return text
    size = slices * expert_size * args.pipeline_model_parallel_size
    if args.world_size % size:
        return (
            f"{args.world_size} trainer ranks are no multiple of expert tensor {slices} × expert {expert_size} × "
            f"pipeline {args.pipeline_model_parallel_size} = {size}"
        )
    if tensor > 1 and not args.sequence_parallel:
        return (
            f"--tensor-model-parallel-size {tensor} with experts needs --sequence-parallel: without it each rank would "
            "route all tokens, and Megatron does not train so"
        )
    if tensor > 1 and expert_size == 1 and slices != tensor:
        return (
            f"--expert-tensor-parallel-size {slices} with --tensor-model-parallel-size {tensor} and "
            "--expert-model-parallel-size 1: Megatron's gradients of the experts are wrong without an error. Take "
            f"--expert-model-parallel-size {tensor}, or leave --expert-tensor-parallel-size out"
        )
    dispatcher = args.moe_token_dispatcher_type
    if "moe_token_dispatcher_type" in args.given and dispatcher != "alltoall":
        for option, ranks in (("pipeline", args.pipeline_model_parallel_size), ("expert", expert_size)):
            if ranks > 1:
                return (
                    f"--moe-token-dispatcher-type {dispatcher} with --{option}-model-parallel-size {ranks}: packs "
                    "differ in length from rank to rank, and alltoall alone allows that"
                )
    return None


RULES: tuple[Rule, ...] = (
    _model_parallel,
    _data_parallel,
    _heads,
    _tensor,
    _pipeline,
    _virtual_pipeline,
    _experts,
)
