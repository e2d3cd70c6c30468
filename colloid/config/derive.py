"""What follows from the given options: devices, batch sizes, schedules.

Each function sets attributes that were left open, and nothing that the user gave. Rules between options are in
`checks.py`; what a value cannot be derived from is an error here, with its numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from colloid.config import sglang_installed
from colloid.config.args import Args
from colloid.config.devices import num_cuda_devices
from colloid.config.external import external_addresses, is_external
from colloid.config.layout import least_ranks
from colloid.config.served_models import one_model
from colloid.config.services import resolve_services
from colloid.config.sft import resolve_sft
from colloid.config.sglang_config import resolve_servers
from colloid.errors import ConfigError


def _default(args: Args, **values: Any) -> None:
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def resolve_devices(args: Args) -> None:
    """Sets `device`, the numbers of ranks, slots and engines, backend and precision.

    On CPU the `--*-num-gpus*` options count processes.
    """
    gpus = num_cuda_devices() if args.device in ("auto", "cuda") else 0
    if args.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: there is no CUDA device here; leave it out, or take --device cpu")
    args.device = "cuda" if gpus else "cpu"
    counts = ("actor_num_gpus_per_node", "rollout_num_gpus", "colocate")
    external = is_external(args)
    if gpus and not external and not args.given & {*counts, "actor_num_nodes"}:
        args.colocate, args.actor_num_gpus_per_node = True, gpus
    least = -(-least_ranks(args) // args.actor_num_nodes)
    _default(args, actor_num_gpus_per_node=max(least, gpus // args.actor_num_nodes) if args.colocate else least)
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    resolve_servers(args)
    _default(args, rollout_num_gpus=args.world_size if args.colocate else args.rollout_num_gpus_per_engine)
    if args.sglang_config is None and args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        raise ConfigError(
            f"--rollout-num-gpus {args.rollout_num_gpus} is not a multiple of --rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine}"
        )
    if external:
        args.rollout_num_gpus = 0
    if args.sglang_config is None:
        args.sglang_models = one_model(args)
    args.num_engines = sum(model.num_engines for model in args.sglang_models)
    if external:  # none is started
        args.sglang_models = tuple(replace(model, groups=()) for model in args.sglang_models)
        args.num_engines = len(external_addresses(args.rollout_external_engine_addrs))
    if args.rollout_engine == "auto":
        args.rollout_engine = "sglang" if gpus and sglang_installed.is_here(args) else "embedded"
    if external:  # they are asked, once the run starts
        pass
    elif args.rollout_engine == "embedded" and args.device == "cuda":
        args.warnings.append(f"the embedded engine generates on the CPU; for SGLang, {sglang_installed.INSTALL}")
    elif args.rollout_engine == "embedded" and args.rollout_num_gpus_per_engine > 1:
        args.warnings.append("on CPU an engine is one process, whatever --rollout-num-gpus-per-engine says")
    _default(args, distributed_backend="nccl" if args.device == "cuda" else "gloo")
    _default(args, transformer_impl="transformer_engine" if args.device == "cuda" else "local")
    if "bf16" not in args.given:
        args.bf16 = args.device == "cuda"
    args.params_dtype = "bfloat16" if args.bf16 else "float32"


def resolve_batch_sizes(args: Args) -> None:
    """Makes `rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout` hold.

    What is missing of the four is derived: first the steps or the global batch size, then (where these contradict the
    defaults) the rollout batch size or the number of samples.

    Raises:
        ConfigError: the given ones contradict each other; shows the equation with its numbers.
    """
    given_prompts, given_samples = args.rollout_batch_size, args.n_samples_per_prompt
    prompts, samples = given_prompts or 32, given_samples or (1 if args.loss_type == "sft_loss" else 8)
    batch, steps = args.global_batch_size, args.num_steps_per_rollout
    total = prompts * samples
    if batch is None:
        steps = steps or 1
        batch = total // steps
    elif steps is None:
        steps = max(1, total // batch)
    if prompts * samples != batch * steps:
        if given_prompts is None and (batch * steps) % samples == 0:
            prompts = batch * steps // samples
        elif given_samples is None and (batch * steps) % prompts == 0:
            samples = batch * steps // prompts
        elif given_prompts is None and given_samples is None:
            prompts, samples = batch * steps, 1
    if prompts * samples != batch * steps:
        raise ConfigError(_equation(args, prompts, samples, batch, steps))
    args.rollout_batch_size, args.n_samples_per_prompt = prompts, samples
    args.global_batch_size, args.num_steps_per_rollout = batch, steps
    _default(args, over_sampling_batch_size=prompts)


def _equation(args: Args, prompts: int, samples: int, batch: int, steps: int) -> str:
    left = f"{prompts} × {samples} = {prompts * samples}"
    if "global_batch_size" not in args.given:
        return (
            "rollout_batch_size × n_samples_per_prompt must be a multiple of num_steps_per_rollout, but "
            f"{left} is no multiple of {steps}"
        )
    if "num_steps_per_rollout" not in args.given:
        return (
            "rollout_batch_size × n_samples_per_prompt must be a multiple of global_batch_size, but "
            f"{left} is no multiple of {batch}"
        )
    return (
        "rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout does not hold: "
        f"{left}, but {batch} × {steps} = {batch * steps}. Change one of the four, or leave one out"
    )


def resolve_algorithm(args: Args) -> None:
    """Sets the upper clip range, the transport, and what SFT implies."""
    resolve_sft(args)
    resolve_services(args)
    _default(args, eps_clip_high=args.eps_clip)
    args.auto_weight_transport = args.update_weight_transport == "auto"
    if args.update_weight_transport == "auto" and is_external(args) and args.update_weight_mode == "full":
        args.update_weight_transport = "nccl" if args.device == "cuda" else "gloo"  # reaches any host
    if args.update_weight_transport == "auto":
        args.update_weight_transport = "disk" if args.update_weight_mode == "delta" else "tensor"


def resolve_schedule(args: Args) -> None:
    """Sets `num_epoch` where there is no number of rollouts, and the schedules where there is one."""
    if args.num_rollout is None:
        _default(args, num_epoch=1)
        args.train_iters = None
    else:
        if args.num_epoch is not None:
            args.warnings.append(f"--num-epoch {args.num_epoch} is ignored: --num-rollout {args.num_rollout} is given")
        _set_iterations(args)


def resolve_num_rollout(args: Args, dataset_length: int) -> int:
    """The number of rollouts; derived from the data where it was not given. Sets the schedules with it.

    Args:
        dataset_length: prompts in the data set, after filtering.

    Raises:
        ConfigError: the data does not fill one rollout.
    """
    if args.num_rollout is None:
        if not dataset_length and "data_source_path" in args.given:
            raise ConfigError(
                f"the data source {args.data_source_path} has no length (__len__, or that of its dataset), so nothing "
                "says how long the run is; give --num-rollout"
            )
        total = args.num_epoch * dataset_length
        if total < args.rollout_batch_size:
            data = " ".join(args.prompt_data or ["the data source"])
            raise ConfigError(
                f"{data} has {dataset_length} prompts: {args.num_epoch} × {dataset_length} is less than "
                f"one --rollout-batch-size {args.rollout_batch_size}. Lower it, or raise --num-epoch"
            )
        args.num_rollout = total // args.rollout_batch_size
        _set_iterations(args)
    return args.num_rollout


def _set_iterations(args: Args) -> None:
    """Optimizer steps of the run, of the decay of the learning rate (all of them), and of its warm-up."""
    args.train_iters = args.num_rollout * args.num_steps_per_rollout
    _default(args, lr_decay_iters=args.train_iters)
    if args.lr_warmup_fraction is not None:
        args.lr_warmup_iters = int(args.lr_warmup_fraction * args.lr_decay_iters)
