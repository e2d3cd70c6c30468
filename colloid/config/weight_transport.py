"""Which options of weight updates go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from colloid.config import sglang
from colloid.config.external import is_external
from colloid.config.placement import Placement, places_of_model
from colloid.config.served_models import policy_model
from colloid.errors import ConfigError

if TYPE_CHECKING:
    from colloid.config.args import Args

_OF_DISK = ("update_weight_disk_dir", "update_weight_disk_keep_files", "custom_update_weight_post_write_path")
_OF_DELTA = ("update_weight_local_checkpoint_dir", "update_weight_delta_encoding", "update_weight_delta_checksum")


def _delta(args: Args) -> str | None:
    transport = args.update_weight_transport
    if args.update_weight_mode == "delta" and transport != "disk":
        return (
            f"--update-weight-mode delta goes through files: --update-weight-transport disk (or auto), not {transport}"
        )
    if args.update_weight_mode == "delta" and args.rollout_engine == "embedded":
        precision = sglang.EMBEDDED_DTYPES.get(args.sglang_dtype) or args.params_dtype
        if precision == "bfloat16" and args.params_dtype == "float32":
            return (
                f"--update-weight-mode delta: the engines hold {precision}, the trainer {args.params_dtype}, so that "
                "changes cannot be applied to what they hold: leave out --sglang-dtype, or take --bf16"
            )
    return None


def _unused(args: Args) -> str | None:
    for names, option, wanted in (
        (_OF_DISK, "update_weight_transport", "disk"),
        (_OF_DELTA, "update_weight_mode", "delta"),
    ):
        given = [name for name in names if name in args.given]
        if given and getattr(args, option) != wanted:
            flag = f"--{option.replace('_', '-')}"
            return f"--{given[0].replace('_', '-')} needs {flag} {wanted}, which is {getattr(args, option)}"
    return None


def _nccl(args: Args) -> str | None:
    embedded = args.rollout_engine == "embedded" and not is_external(args)  # what those are is asked later
    if args.update_weight_transport == "nccl" and (args.device == "cpu" or embedded):
        where = "--device cpu" if args.device == "cpu" else "--rollout-engine embedded"
        return f"--update-weight-transport nccl needs CUDA on both sides, and there is {where}: take gloo, or tensor"
    return None


def settle_transport(args: Args, placement: Placement) -> None:
    """Shared memory is of one host: where an engine is on another one than trainer rank 0, which sends the weights,
    `auto` becomes a broadcast.

    Raises:
        ConfigError: shared memory was asked for.
    """
    if args.update_weight_transport != "tensor" or not placement.ranks or not placement.engines:
        return
    sender = placement.nodes[placement.ranks[0].node].address
    others = placement.hosts(places_of_model(args, placement, policy_model(args).name)) - {sender}
    if not others:
        return
    broadcast = "nccl" if args.device == "cuda" and args.rollout_engine == "sglang" else "gloo"
    if not args.auto_weight_transport:
        raise ConfigError(
            f"--update-weight-transport tensor is shared memory of one host: trainer rank 0, which sends the weights, "
            f"is on {sender}, and engines are on {', '.join(sorted(others)[:5])}. Take {broadcast} or disk, or leave "
            "the option out"
        )
    args.update_weight_transport = broadcast


RULES: tuple[Callable[[Args], str | None], ...] = (_delta, _unused, _nccl)
