"""Values for Megatron-Core's config classes, of the options that name one of their fields."""

from __future__ import annotations

from typing import Any

from colloid.config import tsv
from colloid.config.args import Args
from colloid.config.megatron import DEFAULTS
from colloid.config.tables import tables


def transformer_fields(args: Args) -> dict[str, Any]:
    """Fields of `TransformerConfig` that the user gave, that follow from the model, or where our default is our own.

    With latent attention, those of `MLATransformerConfig` too.

    Enums and dtypes are names (`"flash"`, `"bfloat16"`). What a field needs of torch (the activation function) is not
    in it.
    """
    fields = _fields(args, "TransformerConfig")
    if args.multi_latent_attention:
        # Without a rank the queries have no latent; Megatron's default is a rank.
        fields |= {"q_lora_rank": args.q_lora_rank, **_fields(args, "MLATransformerConfig")}
    if args.recompute_activations and "recompute_granularity" not in fields:
        fields["recompute_granularity"] = "selective"
    if args.deterministic:
        fields["deterministic_mode"] = True
    fields.pop("overlap_p2p_comm", None)
    if args.virtual_pipeline_model_parallel_size:
        # Only an interleaved schedule can overlap; with two stages it has to.
        fields |= {"overlap_p2p_comm": args.overlap_p2p_comm, "batch_p2p_comm": not args.overlap_p2p_comm}
    if args.device == "cpu":
        fields.pop("attention_backend", None)
    return fields


def optimizer_fields(args: Args) -> dict[str, Any]:
    """Fields of `OptimizerConfig`, like `transformer_fields`."""
    return _fields(args, "OptimizerConfig")


def ddp_fields(args: Args) -> dict[str, Any]:
    """Fields of `DistributedDataParallelConfig`, like `transformer_fields`."""
    fields = _fields(args, "DistributedDataParallelConfig")
    if args.use_distributed_optimizer:
        fields["use_distributed_optimizer"] = True
    if args.overlap_param_gather:
        fields["overlap_param_gather"] = True
    if "accumulate_allreduce_grads_in_fp32" in args.given:
        fields["grad_reduce_in_fp32"] = args.accumulate_allreduce_grads_in_fp32
    if "ddp_bucket_size" in args.given:
        fields["bucket_size"] = args.ddp_bucket_size
    if "check_for_nan_in_loss_and_grad" in args.given:
        fields["check_for_nan_in_grad"] = args.check_for_nan_in_loss_and_grad
    return fields


def _fields(args: Args, owner: str) -> dict[str, Any]:
    chosen = args.given | args.derived | DEFAULTS.keys() | {"lr", "clip_grad"}
    fields: dict[str, Any] = {}
    for row in tsv.read("megatron"):
        class_name, _, field = row["megatron-core 0.16.1 field"].partition(".")
        option = tables().by_name.get(row["flag"].split("|")[0])
        if class_name != owner or option is None or option.dest not in chosen:
            continue
        if option.category != "megatron" and option.dest not in ("lr", "clip_grad"):
            continue
        value = getattr(args, option.dest)
        if value is not None:
            fields[field] = value
    return fields
