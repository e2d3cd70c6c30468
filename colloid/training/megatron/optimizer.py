"""Megatron's optimizer and its learning-rate schedule, from `args`. The schedule counts optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from colloid.config.megatron_fields import optimizer_fields
from colloid.errors import ConfigError
from colloid.training.megatron.config import DTYPES
from colloid.training.megatron.stateless_adam import make_stateless, parts


def build_optimizer(args: Any, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Over all parameters of this rank's chunks. With bf16 it holds float32 main parameters."""
    ddp = chunks[0].ddp_config
    dtype = DTYPES[args.params_dtype]
    fields = (
        {"min_lr": 0.0}
        | optimizer_fields(args)
        | {
            "params_dtype": dtype,
            "bf16": dtype is torch.bfloat16,
            "use_distributed_optimizer": ddp.use_distributed_optimizer,
            "overlap_param_gather": ddp.overlap_param_gather,
        }
    )
    fields |= {name: DTYPES[value] for name, value in fields.items() if isinstance(value, str) and value in DTYPES}
    optimizer = get_megatron_optimizer(OptimizerConfig(**fields), chunks)
    if args.use_stateless_adam:
        make_stateless(optimizer)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_scheduler(args: Any, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay over the run's optimizer steps.

    Raises:
        ConfigError: the warm-up is longer than the whole schedule.
    """
    config = optimizer.config
    total = args.lr_decay_iters or max(1, args.num_rollout * args.num_steps_per_rollout)
    warmup = args.lr_warmup_iters or 0
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * total)
    if warmup >= total and warmup > 0:
        raise ConfigError(
            f"the learning rate warms up for {warmup} optimizer steps of {total} in all: make --lr-warmup-iters (or "
            "--lr-warmup-fraction) smaller, or --lr-decay-iters larger"
        )
    decay = config.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init or 0.0,
        max_lr=config.lr,
        min_lr=config.min_lr or 0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=total,
        lr_decay_style=args.lr_decay_style,
        start_wd=decay if args.start_weight_decay is None else args.start_weight_decay,
        end_wd=decay if args.end_weight_decay is None else args.end_weight_decay,
        wd_incr_steps=total,
        wd_incr_style=args.weight_decay_incr_style or "constant",
        wsd_decay_steps=args.lr_wsd_decay_iters,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def reset_states(optimizer: MegatronOptimizer) -> None:
    """Forgets moments and number of steps, in place; the main parameters of bf16 stay."""
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = group["step"] * 0
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if name in state:
                    state[name].zero_()


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """That the next step takes."""
    return float(optimizer.param_groups[0]["lr"])
