"""From a command line to `Args`: parse, derive, check, in this order."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence

from colloid.config import (
    asynchrony,
    checks,
    debug,
    derive,
    eval_config,
    layout,
    model,
    offload,
    rewards,
    roles,
    rundir,
    sglang_config,
)
from colloid.config.args import Args
from colloid.config.files import read_config
from colloid.config.restart import Restart
from colloid.config.tables import tables
from colloid.config.tokens import HELP, parse_mapping, parse_tokens
from colloid.errors import ConfigError

EXIT_USAGE = 2


def parse(argv: Sequence[str] | None = None, entry: str = "train") -> Args:
    """The resolved and checked options.

    Args:
        argv: without the program's name; None: this process's.
        entry: "train" or "train_async".

    Raises:
        ConfigError: an option is unknown, wrong, contradicts another, or is not supported.
    """
    return parse_given(given_options(sys.argv[1:] if argv is None else list(argv)), entry)


def given_options(argv: Sequence[str]) -> dict[str, object]:
    """The options of a command line and of the files that it names, attribute -> value.

    Raises:
        ConfigError: an option or a file is unknown or wrong.
    """
    return _read_files(parse_tokens(argv))


def parse_given(given: Mapping[str, object], entry: str = "train", restart: Restart | None = None) -> Args:
    """The same as `parse`, of options that were read already.

    Args:
        restart: the run begins again, in the run directory of the one that failed.
    """
    args = Args({**tables().defaults(), **copy.deepcopy(dict(given))}, given=given.keys())  # they stay as they are
    args.entry, args.warnings, args.init_checkpoint = entry, [], None
    args.num_restarts, args.failed_at = (restart.number, restart.failed_at) if restart else (0, None)
    resolve(args, restart)
    args.forget_reads()
    args.mark_read(*_READ_BY_PARSING)
    args.mark_read(*(row.dest for row in tables().options if row.category in ("sglang", "router")))
    args.mark_read(*(args.given & args.derived), *eval_config.read_for_sets(args))
    return args


_READ_BY_PARSING = [
    "config",
    "custom_config_path",
    "dry_run",
    "eval_config",
    "eval_prompt_data",
    "outputs_dir",
    "run_name",
    "device",
    "load",
    "ckpt_step",
    "ref_ckpt_step",
    "loss_mask_type",
    "dump_details",
    "opd_type",
    "opd_teacher_ckpt_step",
    "finetune",
    "num_epoch",
    "hf_checkpoint",
    "ref_load",
    "train_backend",
    "rollout_engine",
    "rollout_num_gpus",
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "num_gpus_per_node",
    "use_tensorboard",
    "profile",
    "model_name",
    "rollout_data_transport",
    "balance_data",
    "bf16",
    "global_batch_size",
    "num_steps_per_rollout",
    "eps_clip",
    "update_weight_transport",
    "update_weight_mode",
    "lr_warmup_fraction",
    "distributed_backend",
    "use_rotary_position_embeddings",
    "add_position_embedding",
    "use_mcore_models",
    "use_dist_ckpt",
    "ckpt_format",
    "normalization",
    "position_embedding_type",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "spec",
    "seq_length",
    "megatron_config_path",
    "sglang_config",
]
"""Options whose effect is on others, or on what is made of them here."""


def _read_files(line: dict[str, object]) -> dict[str, object]:
    """Options of `--config`, then of `--custom-config-path`, then of the command line: the later wins."""
    chosen: dict[str, object] = {}
    if line.get("config"):
        path = str(line["config"])
        chosen, _ = parse_mapping(read_config(path, "--config"), path)
        if chosen.keys() & {"config"}:
            raise ConfigError(f"{path}: a config file cannot name another one")
    custom = line.get("custom_config_path") or chosen.get("custom_config_path")
    if custom:
        known, others = parse_mapping(read_config(str(custom), "--custom-config-path"), str(custom), allow_unknown=True)
        taken = sorted(name for name in others if hasattr(Args, name))
        if taken:
            raise ConfigError(f"{custom}: {taken[0]!r} is a method of args; take another name")
        chosen = {**chosen, **known, **others}
    return {dest: value for dest, value in {**chosen, **line}.items() if value is not None}


def resolve(args: Args, restart: Restart | None = None) -> None:
    """Sets all that follows from the given options, then checks them."""
    early = checks.not_supported(args, at_run=False)
    if early:
        raise ConfigError("\n       ".join(early))
    derive.resolve_devices(args)
    derive.resolve_batch_sizes(args)
    derive.resolve_algorithm(args)
    eval_config.resolve_evaluation(args)
    rewards.resolve_rewards(args)
    roles.resolve_roles(args)
    debug.resolve_debug(args)
    asynchrony.resolve_async(args)
    derive.resolve_schedule(args)
    model.resolve_load(args)
    model.resolve_model(args)
    model.switch_off_on_cpu(args)
    sglang_config.choose_policy(args)
    layout.resolve_layout(args)
    offload.resolve_offload(args)
    rundir.resolve_run_directory(args, restart)
    if args.deterministic:
        args.sglang_enable_deterministic_inference = True
    checks.check(args)
    args.warnings += checks.warnings(args)


def parse_args(argv: Sequence[str] | None = None, entry: str = "train") -> Args:
    """`parse` for a program: `--help` and `--dry-run` print and end it, errors end it with 2, without a traceback."""
    return parse_program(argv, entry)[0]


def parse_program(
    argv: Sequence[str] | None = None, entry: str = "train", restart: Restart | None = None
) -> tuple[Args, dict[str, object]]:
    """The same for a run; also returns the options as they were given.

    Args:
        restart: takes the place of the command line.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    asked = next((word for word in words if word in HELP), None)
    if asked is not None:
        from colloid.config.help import help_text

        print(help_text(HELP[asked], entry))
        raise SystemExit(0)
    try:
        given = given_options(words) if restart is None else restart.options
        args = parse_given(given, entry, restart)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    for warning in args.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if args.dry_run:
        from colloid.config.plan import describe_options, describe_plan

        print(describe_options(args))
        print(describe_plan(args))
        raise SystemExit(0)
    return args, given
