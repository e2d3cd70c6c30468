"""Does a torch_dist checkpoint hold this model? Names and shapes are compared before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from colloid.errors import ConfigError
from colloid.weights.hf_loader import some

OPTIMIZER = "optimizer."
"""What names of the optimizer's tensors begin with."""


def check_fit(directory: Path, model_state: dict[str, Any], vocab_size: int) -> None:
    """Compares the checkpoint's tensors with the model's. Collective over all ranks.

    Args:
        model_state: sharded state dict of this rank's part of the model.
        vocab_size: rows of the embedding that are in use; how many follow depends on the layout.

    Raises:
        ConfigError: lists the first tensors that differ, with their shapes. The same on all ranks.
    """
    stored = {
        key: tuple(tensor.global_shape)
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(directory)).items()
        if not key.startswith(OPTIMIZER)
    }
    everyones: list[dict[str, tuple]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, _tensors(model_state))
    wanted = {key: value for part in everyones for key, value in part.items()}
    problems = []
    for key, (shape, padded) in sorted(wanted.items()):
        found = stored.get(key)
        if found is None:
            problems.append(f"{key} {shape} is missing")
        elif padded:
            if found[1:] != shape[1:] or found[0] < vocab_size:
                problems.append(f"{key} is {found} where the model has {(vocab_size, *shape[1:])}")
        elif found != shape:
            problems.append(f"{key} is {found} where the model has {shape}")
    problems += [f"{key} {stored[key]} is not part of the model" for key in sorted(stored.keys() - wanted.keys())]
    if problems:
        raise ConfigError(f"the checkpoint {directory} does not fit the config: {some(problems, '; ')}")


def check_optimizer_fit(directory: Path, optimizer_state: dict[str, Any]) -> None:
    """Compares the tensors of the checkpoint's optimizer with this one's. Collective.

    Args:
        optimizer_state: sharded state dict of this rank's part of the optimizer.

    Raises:
        ConfigError: lists the first that only one of them has. The same on all ranks.
    """
    stored = {key for key in dist_checkpointing.load_tensors_metadata(str(directory)) if key.startswith(OPTIMIZER)}
    everyones: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, set(_tensors(optimizer_state)))
    different = sorted(set().union(*everyones) ^ stored)
    if different:
        raise ConfigError(
            f"the optimizer of the checkpoint {directory} is of another kind than this run's, or trained other "
            f"parameters; only one of the two has {some(different)}: give --optimizer, --only-train-params-name-list "
            "and --freeze-params-name-list as they were, or start the optimizer anew with --no-load-optim"
        )


def _tensors(state: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Name -> (shape of the whole tensor, whether its first dimension is padded by layout)."""
    found = {}
    for value in nested_values(state):
        parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for part in parts:
            if isinstance(part, ShardedTensor):
                found[part.key] = (tuple(part.global_shape), part.allow_shape_mismatch)
    return found
