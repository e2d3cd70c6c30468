"""The tensors that make up a trainer rank's memory: of Megatron's model, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from colloid.training.megatron.model import unwrap
from colloid.training.megatron.stateless_adam import parts


def state_tensors(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Parameters and buffers of the model; main parameters and moments of the optimizer."""
    for chunk in chunks:
        yield from (parameter.data for parameter in chunk.parameters())
        yield from unwrap(chunk).buffers()
        yield from (buffer.param_data for buffer in _buffers(chunk) if buffer.param_data is not None)
    for parameter in _optimized(optimizer):
        yield parameter.data
    for part in parts(optimizer):
        for state in getattr(part.optimizer, "state", {}).values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def gradient_tensors(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """What every step begins by setting to zero."""
    for chunk in chunks:
        yield from (buffer.grad_data for buffer in _buffers(chunk))
        yield from (parameter.grad for parameter in chunk.parameters() if parameter.grad is not None)
    yield from (parameter.grad for parameter in _optimized(optimizer) if parameter.grad is not None)


def _buffers(chunk: DistributedDataParallel) -> list:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _optimized(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """What the optimizer steps on: the parameters, or its own float32 copies (of its part) of them."""
    for part in parts(optimizer):
        for group in getattr(part.optimizer, "param_groups", []):
            yield from group["params"]
