"""Rules between options, in one table. A rule looks and says; it changes nothing.

Each returns an error message, or None. `RULES` hold for every use; `RUN_RULES` when a run starts, not for a plan
(`--dry-run`), which needs neither the data nor a build that can do all that the plan says.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from colloid.config import (
    algorithm,
    asynchrony,
    cluster,
    debug,
    eval_config,
    external,
    layout,
    megatron,
    model_names,
    offload,
    profiling,
    restart,
    rewards,
    roles,
    routing,
    sampling,
    served_models,
    services,
    sft,
    sglang,
    sglang_installed,
    sglang_parallel,
    tracking,
    trainer,
    weight_transport,
)
from colloid.config.args import Args
from colloid.config.option import BOOLEANS, Option
from colloid.config.prompt_files import parse_prompt_files, unreadable
from colloid.config.tables import tables
from colloid.errors import ConfigError
from colloid.hook_kinds import KINDS
from colloid.models import families

Rule = Callable[[Args], "str | None"]


def check(args: Args) -> None:
    """Raises `ConfigError` with what the broken rules say."""
    rules = [*RULES]
    if not args.dry_run:
        rules += CONVERT_RULES if args.entry == "convert" else RUN_RULES
    broken = [text for rule in rules if (text := rule(args))]
    if broken:
        raise ConfigError("\n       ".join(broken))


def not_supported(args: Args, at_run: bool) -> list[str]:
    """A sentence for each given option whose value is refused: which, why, and what to do. `at_run`: those that a plan
    may have.
    """
    found = []
    for dest in sorted(args.given):
        value = args.as_dict(redact=False, only=[dest])[dest]
        refusing = [option for option in tables().by_dest.get(dest, ()) if not option.supports(value)]
        if refusing and refusing[0].at_run == at_run:
            found.append(refusal(refusing[0], value))
    return found


def refusal(option: Option, value: object) -> str:
    """Why this value of an option is refused."""
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    what = option.flag if option.kind in BOOLEANS else f"{option.flag} {shown}"
    works = f" (what works: {', '.join(map(str, option.built))})" if option.built else ""
    return f"{what} is not supported{works}: {option.refused}"


def _model_options(args: Args) -> str | None:
    return "\n       ".join(not_supported(args, at_run=True)) or None


def _model_family(args: Args) -> str | None:
    reasons = families.unsupported(args.hf_config)
    return f"the model {args.hf_checkpoint} is not supported yet: {', '.join(reasons)}" if reasons else None


def _spec(args: Args) -> str | None:
    """The layers follow from the model; a spec that stands for a family is only compared with it."""
    if not args.spec:
        return None
    spec, model = " ".join(args.spec), families.family_name(args.hf_config)
    family = families.SPECS.get(spec)
    if family is None:
        return (
            f"--spec {spec} is not supported: the layers follow from the model, so leave it out (what is known: "
            f"{', '.join(families.SPECS)})"
        )
    if family in families.NOT_BUILT:
        return f"--spec {spec} is not supported yet: {families.NOT_BUILT[family]}"
    return None if family == model else f"--spec {spec} is for models of type {family!r}, but this one is {model!r}"


def _set_by_colloid(args: Args) -> str | None:
    for dest in sorted(args.given & sglang.SET_BY_COLLOID.keys()):
        return f"{tables().by_dest[dest][0].flag} cannot be given: {sglang.SET_BY_COLLOID[dest]}"
    return None


def _prompt_data(args: Args) -> str | None:
    if args.debug_train_only or not args.rollout_global_dataset:
        return None
    if args.prompt_data is None and "data_source_path" in args.given:
        return None
    if args.prompt_data is None:
        return "no prompts: give a file with --prompt-data FILE"
    return _first_unreadable("--prompt-data", args.prompt_data)


def _first_unreadable(option: str, names: list[str]) -> str | None:
    files = parse_prompt_files(names, option)
    return next((text for file in files if (text := unreadable(file, option))), None)


def _data(args: Args) -> str | None:
    files, weights = args.prompt_data or [], args.prompt_data_weights
    parse_prompt_files(files)
    if weights is not None and len(weights) != len(files):
        return f"--prompt-data-weights has {len(weights)} values for {len(files)} files of --prompt-data; give one each"
    if weights is not None and min(weights) == 0:
        return "--prompt-data-weights: a file of weight 0 is never read; leave it out of --prompt-data"
    if "streaming_window" in args.given and not args.streaming_data:
        return f"--streaming-window {args.streaming_window} needs --streaming-data: else all are shuffled together"
    if args.num_data_workers > 64:
        return f"--num-data-workers {args.num_data_workers}: at most 64 are of use; take about the number of free cores"
    return None


def _hook_files(args: Args) -> str | None:
    for kind in KINDS.values():
        option = tables().by_name[kind.option]
        value = getattr(args, option.dest)
        paths = list(value) if isinstance(value, (list, tuple)) else [value]
        for path in [*paths, *eval_config.hook_paths(args, option.dest)]:
            file = path.partition(".py:")[0] + (".py" if path and ".py:" in path else "") if path else ""
            if file.endswith(".py") and not os.path.isfile(file):
                return f"{kind.option} {path}: there is no file {os.path.abspath(file)}"
    return None


def _context(args: Args) -> str | None:
    limit, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if limit is not None and prompt is not None and prompt >= limit:
        return f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {limit}"
    engine = served_models.engine_context_length(args)
    if limit is not None and engine is not None and engine < limit:
        name = "--sglang-context-length" if engine == args.sglang_context_length else "--sglang-config: context_length"
        return f"{name} {engine} is less than --rollout-max-context-len {limit}"
    return None


def _greedy(args: Args) -> str | None:
    if args.rollout_temperature == 0:
        return (
            "--rollout-temperature 0 samples greedily: all samples of a prompt are equal, and log-probs have no "
            "meaning; take one above 0 (--eval-temperature 0 is fine)"
        )
    return None


def _over_sampling(args: Args) -> str | None:
    if args.over_sampling_batch_size < args.rollout_batch_size:
        return (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is less than --rollout-batch-size "
            f"{args.rollout_batch_size}"
        )
    return None


def _backend(args: Args) -> str | None:
    right = "gloo" if args.device == "cpu" else "nccl"
    if args.distributed_backend != right:
        return (
            f"--distributed-backend {args.distributed_backend} does not work with --device {args.device}: it is {right}"
        )
    if args.device == "cpu" and args.transformer_impl == "transformer_engine":
        return "--transformer-impl transformer_engine needs CUDA devices; on CPU it is local"
    return None


def _cuda_optimizer(args: Args) -> str | None:
    found = sorted(args.given & megatron.PASSED_ON_WITH_CUDA)
    if args.device == "cuda" or not found:
        return None
    names = ", ".join(tables().by_dest[dest][0].flag for dest in found)
    return f"{names}: for CUDA alone; on a CPU the optimizer's state is in the host's memory, in float32, anyway"


def _schedule(args: Args) -> str | None:
    warmup, decay = args.lr_warmup_iters, args.lr_decay_iters
    if "lr_warmup_fraction" in args.given and "lr_warmup_iters" in args.given:
        return "--lr-warmup-fraction and --lr-warmup-iters say the same: leave one out"
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction <= 1:
        return f"--lr-warmup-fraction {args.lr_warmup_fraction} must be between 0 and 1"
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        return "--lr-decay-style WSD needs --lr-wsd-decay-iters"
    if decay is not None and args.lr_decay_style != "constant" and warmup >= decay > 0:
        return f"the warm-up of {warmup} steps must be shorter than the decay of {decay} steps"
    if args.min_lr > args.lr:
        return f"--min-lr {args.min_lr} is greater than --lr {args.lr}"
    if args.weight_decay_incr_style != "constant" and None in (args.start_weight_decay, args.end_weight_decay):
        return "--weight-decay-incr-style other than constant needs --start-weight-decay and --end-weight-decay"
    return None


def _schedules_of_roles(args: Args) -> str | None:
    for role, overrides in args.role_overrides.items():
        text = _schedule(roles.role_args(args, role)) if overrides else None
        if text:
            return f"--megatron-config-path {args.megatron_config_path}: {role}: {text}"
    return None


def _template_kwargs(args: Args) -> str | None:
    if not isinstance(args.apply_chat_template_kwargs, dict):
        return f"--apply-chat-template-kwargs must be a JSON object, not {args.apply_chat_template_kwargs!r}"
    return None


def _dynamic_batch(args: Args) -> str | None:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        return "--use-dynamic-batch-size needs --max-tokens-per-gpu N: the tokens of a micro-batch"
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        return f"--max-tokens-per-gpu {args.max_tokens_per_gpu} needs --use-dynamic-batch-size"
    if args.use_dynamic_batch_size and "micro_batch_size" in args.given:
        return f"--micro-batch-size {args.micro_batch_size} and --use-dynamic-batch-size exclude each other"
    log_probs, trained = args.log_probs_max_tokens_per_gpu, args.max_tokens_per_gpu
    if log_probs is not None and not args.use_dynamic_batch_size:
        return f"--log-probs-max-tokens-per-gpu {log_probs} needs --use-dynamic-batch-size"
    if log_probs is not None and log_probs < trained:
        return (
            f"--log-probs-max-tokens-per-gpu {log_probs} is less than --max-tokens-per-gpu {trained}: a pass without "
            "a backward needs less memory, so its budget is at least that"
        )
    return None


def _engine_precision(args: Args) -> str | None:
    if args.rollout_engine == "embedded" and args.sglang_dtype not in sglang.EMBEDDED_DTYPES:
        return f"--sglang-dtype {args.sglang_dtype}: the embedded engine has {', '.join(sglang.EMBEDDED_DTYPES)}"
    return None


def _sglang_on_cpu(args: Args) -> str | None:
    if args.rollout_engine == "sglang" and args.device == "cpu" and args.deterministic:
        return "--deterministic: SGLang is deterministic on CUDA alone; on a CPU take --rollout-engine embedded"
    return None


def _external_router(args: Args) -> str | None:
    if args.sglang_router_ip is None:
        return None
    if args.sglang_router_port is None:
        return f"--sglang-router-ip {args.sglang_router_ip} needs --sglang-router-port: where that router listens"
    given = sglang.given(args, "router").keys() - {"disable_retries"}
    if given or "rollout_router" in args.given:
        names = ", ".join(sorted(f"--router-{name.replace('_', '-')}" for name in given)) or "--rollout-router"
        return f"{names}: the router at --sglang-router-ip {args.sglang_router_ip} runs already, with its own options"
    return None


RULES: tuple[Rule, ...] = (
    *layout.RULES,
    *cluster.RULES,
    *sglang_parallel.RULES,
    *asynchrony.RULES,
    *external.RULES,
    *offload.RULES,
    *weight_transport.RULES,
    *debug.RULES,
    *algorithm.RULES,
    *sft.RULES,
    *eval_config.RULES,
    *tracking.RULES,
    *profiling.RULES,
    *model_names.RULES,
    *services.RULES,
    *roles.RULES,
    *sampling.RULES,
    *rewards.RULES,
    *trainer.RULES,
    *routing.RULES,
    *served_models.RULES,
    _set_by_colloid,
    _data,
    _context,
    _greedy,
    _over_sampling,
    _schedule,
    _schedules_of_roles,
    _template_kwargs,
    _dynamic_batch,
    _engine_precision,
    _sglang_on_cpu,
    _external_router,
)
CONVERT_RULES: tuple[Rule, ...] = (_model_options, _model_family, _backend)
"""For the tools that convert a model: they need no data."""
RUN_RULES: tuple[Rule, ...] = (
    _model_options,
    _model_family,
    _spec,
    _backend,
    _cuda_optimizer,
    _prompt_data,
    _hook_files,
    *eval_config.RUN_RULES,
    *served_models.RUN_RULES,
    sglang_installed.check,
    *debug.RUN_RULES,
    *roles.RUN_RULES,
    *tracking.RUN_RULES,
    *profiling.RUN_RULES,
    *model_names.RUN_RULES,
)


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    found = debug.warnings(args) + algorithm.warnings(args) + roles.warnings(args) + sampling.warnings(args)
    found += trainer.warnings(args) + routing.warnings(args) + tracking.warnings(args)
    found += cluster.warnings(args) + profiling.warnings(args) + restart.warnings(args)
    unused = sglang.unused_by_embedded(args.given)
    if args.rollout_engine == "embedded" and unused:
        names = ", ".join(tables().by_dest[dest][0].flag for dest in unused)
        found.append(f"the embedded engine has no use for {names}")
    if "attention_backend" in args.given and args.device == "cpu":
        found.append(f"--attention-backend {args.attention_backend} has no effect on CPU")
    return found + served_models.warnings(args) + eval_config.warnings(args)
