"""gloo wants equal sizes in the lists of all_gather and reduce_scatter; NCCL does not, and Megatron relies on it
(experts with tensor parallelism). Ragged lists are served by other collectives; equal ones pass through.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Wraps `torch.distributed.all_gather` and `reduce_scatter`."""
    original_gather, original_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return original_gather(outputs, tensor, group=group, async_op=async_op)
        for rank, output in enumerate(outputs):
            if rank == dist.get_rank(group):
                output.copy_(tensor)
            dist.broadcast(output, src=dist.get_global_rank(group, rank), group=group)
        return None

    def reduce_scatter(
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({tensor.shape for tensor in inputs}) == 1:
            return original_scatter(output, inputs, op=op, group=group, async_op=async_op)
        for rank, tensor in enumerate(inputs):
            total = tensor.clone()
            dist.all_reduce(total, op=op, group=group)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
