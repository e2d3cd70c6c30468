"""This rank's place in Megatron's layout, for loading and exporting weights."""

from __future__ import annotations

from megatron.core import parallel_state

from colloid.weights.shards import Coordinates


def weight_coordinates() -> Coordinates:
    """Of this rank."""
    return Coordinates(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        is_replica=parallel_state.get_data_parallel_rank(with_context_parallel=True) > 0,
        is_expert_replica=parallel_state.get_expert_data_parallel_rank() > 0,
    )
