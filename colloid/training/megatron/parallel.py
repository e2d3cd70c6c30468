"""Process groups and random seeds: torch.distributed and Megatron's parallel state."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from colloid.errors import ConfigError
from colloid.training import rendezvous
from colloid.training.sequence_split import SequenceSplit
from colloid.weights.hf_loader import NamedParameters
from colloid.weights.names import NameMap, Shard


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided; what is left over is data parallelism."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None


def initialize(
    rank: int,
    world_size: int,
    init_method: str,
    layout: Layout,
    *,
    seed: int,
    device: str,
    timeout_minutes: int = 10,
) -> None:
    """Joins the world of trainer ranks and divides it.

    Args:
        init_method: `file:///…` on one host, where gloo then listens on loopback alone; else `tcp://address:port`.
        device: `cpu` (gloo) or `cuda` (NCCL, and gloo for host tensors).

    Raises:
        ConfigError: the layout does not divide the number of ranks.
    """
    model_ranks = layout.tensor * layout.pipeline * layout.context
    if world_size % model_ranks:
        raise ConfigError(
            f"{world_size} trainer ranks cannot be divided by tensor {layout.tensor} x pipeline {layout.pipeline} x "
            f"context {layout.context} = {model_ranks} model-parallel ranks: change --actor-num-gpus-per-node or the "
            "--*-parallel-size options"
        )
    if init_method.startswith("file://"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if layout.tensor > 1:
        # Megatron overlaps with communication by the order of launches, which one queue of a device keeps.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    rendezvous.join(init_method, rank, world_size, backend, timedelta(minutes=timeout_minutes))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=timeout_minutes,
    )
    seed_everything(seed)


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy, torch and Megatron's tracker; pipeline stages differ from each other."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def shutdown() -> None:
    """Leaves the world."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_last_stage() -> bool:
    """Whether this rank holds the head of the model."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def tensor_parallel_group() -> dist.ProcessGroup:
    """The ranks that share each layer with this one."""
    return parallel_state.get_tensor_model_parallel_group()


def data_parallel_size() -> int:
    """Into how many parts a batch is split."""
    return parallel_state.get_data_parallel_world_size()


def data_parallel_rank() -> int:
    """Which part of a batch this rank trains; ranks that share the model or the sequences share it."""
    return parallel_state.get_data_parallel_rank()


def sum_over_data_parallel(values: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks that a batch is split over; ranks that share sequences do not count twice. Collective."""
    group = parallel_state.get_data_parallel_group()
    if group.size() > 1:
        values = values.clone()
        dist.all_reduce(values, group=group)
    return values


def gather_objects(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of a group (None: of the world) has to say, by rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def largest(value: int) -> int:
    """The largest of all ranks' values. Collective."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def sequence_split(sequence_parallel: bool, pad_multiple: int = 1) -> SequenceSplit:
    """This rank's part of each sequence.

    Args:
        pad_multiple: what the tokens of a micro-batch are padded to a multiple of, besides what the ranks need.
    """
    return SequenceSplit(
        rank=parallel_state.get_context_parallel_rank(),
        size=parallel_state.get_context_parallel_world_size(),
        multiple=math.lcm(pad_multiple, tensor_parallel_group().size() if sequence_parallel else 1),
    )


def mark_shards(parameters: NamedParameters, names: NameMap) -> None:
    """Tells Megatron's optimizer which parameters tensor parallelism cuts: in the norm of the gradient each rank's
    shard counts, and the others once. Megatron's layers say so themselves only where they initialise their weights.
    """
    for name, parameter in parameters:
        shard = names[name].entry.shard
        if shard is not Shard.REPLICATED and not hasattr(parameter, "tensor_model_parallel"):
            dimension = 1 if shard is Shard.COLUMNS else 0
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


def gather_responses(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Log-probs or entropies of all response tokens, from the parts that the context-parallel ranks computed.

    Every rank computes the whole loss from the result, so each takes the gradient of its own part as it is.

    Args:
        values: [K, R'], of this rank's response tokens.
        rows: int64 [R'], which of all they are.
        count: R, of all response tokens.

    Returns:
        [K, R], the same on all ranks of the context-parallel group.
    """
    return _GatherResponses.apply(values, rows, count)


class _GatherResponses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        whole = values.new_zeros(len(values), count).index_copy_(1, rows, values)
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return whole

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (rows,) = ctx.saved_tensors
        return grad.index_select(1, rows), None, None
