"""What `--dry-run` prints: the resolved options, and the processes that a run would start."""

from __future__ import annotations

from colloid.config.args import Args
from colloid.config.checks import not_supported
from colloid.config.eval_config import has_trainer
from colloid.config.external import is_external
from colloid.config.layout import data_parallel_size
from colloid.config.offload import memory_line
from colloid.config.placement import Demand, assumed_nodes, demand_of
from colloid.config.placement_text import describe_placement
from colloid.config.planner import place
from colloid.config.roles import has_critic
from colloid.config.served_models import (
    PLACEHOLDER,
    REGULAR,
    TEACHER,
    ServerGroup,
    added_teacher,
    has_teacher_engine,
    policy_model,
    served_models,
)
from colloid.config.sft import serves
from colloid.config.tables import tables
from colloid.errors import ConfigError


def describe_options(args: Args) -> str:
    """The resolved options of colloid, by group, and what was given of the other categories. Given ones have a `*`."""
    values = args.as_dict()
    lines = ["options (* given):"]
    for option in tables().options:
        if option.dest not in values or option is not tables().by_dest[option.dest][0]:
            continue
        given, value = option.dest in args.given, values[option.dest]
        own = option.category == "colloid" and option.built != () and value not in (None, [], {}, ())
        model = option.dest in args.derived
        if given or own or model:
            lines.append(f"  {'*' if given else ' '} {option.dest}: {value}")
    return "\n".join(lines)


def describe_plan(args: Args) -> str:
    """The processes of the run and their device slots, and what of it does not work in this version."""
    slot = "GPU" if args.device == "cuda" else "process"
    model = args.hf_checkpoint or "from the model arguments"
    rollouts = (
        args.num_rollout if args.num_rollout is not None else f"{args.num_epoch} × prompts / {args.rollout_batch_size}"
    )
    demand = demand_of(args)
    lines = [
        f"plan ({args.device}, {demand.num_slots} device slots, one a {slot}):",
        "  driver           1 process: the loop",
        "  rollout manager  1 process: data, scheduling, rewards",
        f"  router           {_router(args)}",
        *_engines(args),
        *([f"  teacher          {_teacher(args)}"] if has_teacher_engine(args) else []),
        f"  trainer          {_trainer(args)}",
        *([f"  critic           {args.world_size} more, on the same slots"] if has_critic(args) else []),
        *_placement(args, demand),
        *([f"  memory           {line}"] if (line := memory_line(args)) else []),
        f"  model            {model} ({args.model_type or 'family unknown'})",
        f"  a rollout        {args.rollout_batch_size} prompts × {args.n_samples_per_prompt} samples = "
        f"{args.num_steps_per_rollout} step{'s' * (args.num_steps_per_rollout > 1)} × {args.global_batch_size}",
        f"  rollouts         {rollouts}",
        *([f"  asynchronous     {_ahead(args)}"] if args.entry == "train_async" else []),
        f"  start            {args.resume_from or args.init_checkpoint or 'the model'}",
        f"  run directory    {args.run_dir}",
        f"  checkpoints      {_checkpoints(args)}",
    ]
    later = not_supported(args, at_run=True)
    if later:
        lines += ["  a run would refuse:"] + [f"    {text}" for text in later]
    return "\n".join(lines)


def _placement(args: Args, demand: Demand) -> list[str]:
    """The slots, as a run would give them."""
    try:
        lines = describe_placement(place(assumed_nodes(args, demand), demand))
    except ConfigError as error:
        lines = [f"none: {error}. --num-gpus-per-node N plans for a cluster of such nodes"]
    return [f"  {'placement' if index == 0 else '':<15}  {line}" for index, line in enumerate(lines)]


def _router(args: Args) -> str:
    if not serves(args):
        return "none (--debug-train-only)" if args.debug_train_only else "none (SFT without evaluation)"
    if args.sglang_router_ip:
        return f"the one at {args.sglang_router_ip}:{args.sglang_router_port}"
    port = f"port {args.sglang_router_port}" if args.sglang_router_port else "a free port"
    count = sum(model.num_engines > 0 for model in served_models(args))
    of_policy = "" if count == 1 else f" (that of {policy_model(args).name}), one a model"
    return f"{count} process{'es' * (count > 1)}: {args.rollout_router}, {port}{of_policy}"


def _engines(args: Args) -> list[str]:
    """A line, and with `--sglang-config` one more for each group."""
    head = "  engines          "
    if not serves(args):
        return [head + ("none (--debug-train-only)" if args.debug_train_only else "none (SFT without evaluation)")]
    if is_external(args):
        return [f"{head}{args.num_engines} that run already: {' '.join(args.rollout_external_engine_addrs)}"]
    if args.sglang_config is None:
        return [head + _group(args, args.sglang_models[0].groups[0])]
    lines = [f"{head}{args.num_engines} of {len(args.sglang_models)} models ({args.sglang_config})"]
    for model in args.sglang_models:
        of_policy = model.update_weights
        what = "the policy" if of_policy else f"frozen, {model.model_path or 'the model'}"
        for group in model.groups:
            given = f" {group.overrides}" if group.overrides else ""
            lines.append(f"    {model.name:<15}{_group(args, group)}{given} ({what})")
    return lines


def _group(args: Args, group: ServerGroup) -> str:
    if group.worker_type == PLACEHOLDER:
        return f"none, a placeholder of {group.num_gpus} slots"
    kind = "" if group.worker_type == REGULAR else f" {group.worker_type}"
    slots = group.num_gpus_per_engine
    return f"{group.num_engines} × {args.rollout_engine}{kind}, {slots} slot{'s' * (slots > 1)} each"


def _teacher(args: Args) -> str:
    if not serves(args):
        return "none: the rollouts on disk have its log-probs"
    added = added_teacher(args)
    if added is None:
        return args.rm_url or f"the model {TEACHER!r}"
    return f"1 × {args.rollout_engine} on {added.model_path}, frozen, behind a router of its own"


def _trainer(args: Args) -> str:
    if not has_trainer(args):
        return f"none ({'--debug-rollout-only' if args.debug_rollout_only else '--num-rollout 0: evaluation alone'})"
    ranks = args.world_size
    return (
        f"{ranks} rank{'s' * (ranks > 1)} ({_layout(args)}), {args.params_dtype}, {args.distributed_backend}"
        f"{', colocated' if args.colocate else ''}"
    )


def _layout(args: Args) -> str:
    sizes = {
        "TP": args.tensor_model_parallel_size,
        "PP": args.pipeline_model_parallel_size,
        "CP": args.context_parallel_size,
        "DP": data_parallel_size(args),
        "EP": args.expert_model_parallel_size,
    }
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "not parallel"


def _ahead(args: Args) -> str:
    size, interval, oldest = args.async_buffer_size, args.update_weights_interval, args.max_staleness
    return (
        f"up to {size} rollout{'s' * (size > 1)} ahead of the trainer, weights after {_each(interval)}, tokens at most "
        f"{oldest} update{'s' * (oldest > 1)} old; an update: {args.pause_mode}"
    )


def _each(interval: int) -> str:
    return "each rollout" if interval == 1 else f"each {interval} rollouts"


def _checkpoints(args: Args) -> str:
    if args.save is None:
        return "none (--save-interval N turns them on)"
    return f"{args.save}, " + (f"each {args.save_interval} rollouts" if args.save_interval else "at the end")
