"""The trainer's part of a checkpoint, loadable under any layout of the ranks.

    common.pt  metadata.json  .metadata  *.distcp    model and optimizer, in Megatron's torch_dist format
    rank_00000.pt                                    random states of a rank
    trainer.json                                     rollout, weight version, schedule, layout
    checksums.json                                   size and xxh3_128 of each file above

Loading checks every file first, so that a damaged one is named rather than half loaded. Nothing is unpickled beyond
what torch's `weights_only` admits, the index of torch_dist apart.

The optimizer's state is saved by parameter (`fully_reshardable`), never by rank, so that it fits any layout too. How
it groups its parameters depends on the layout (experts have an optimizer of their own under expert parallelism), and is
not saved: of the groups only the number of steps is, and the schedule sets the rest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from colloid.checkpoints import CHECKSUMS_FILE
from colloid.errors import CheckpointError, ConfigError
from colloid.training.megatron import parallel, random_states
from colloid.training.megatron.checkpoint_files import check_files
from colloid.training.megatron.checkpoint_fit import check_fit, check_optimizer_fit
from colloid.training.megatron.checkpoint_write import CheckpointWriter, last_line
from colloid.training.megatron.model import unwrap
from colloid.training.megatron.parallel import Layout
from colloid.training.megatron.stateless_adam import parts

STATE_FILE = "trainer.json"


@dataclass(frozen=True)
class Trained:
    """How far the trainer is."""

    rollout_id: int
    """The last one that was trained."""
    weight_version: int


def save(
    writer: CheckpointWriter,
    directory: Path,
    state: Trained,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    layout: Layout,
    *,
    with_rng: bool = True,
    background: bool = False,
) -> None:
    """Writes into an existing directory, from all ranks at once.

    Args:
        optimizer: None leaves its state out; so does one that has made no step.
        scheduler: None where nothing was trained (a converted model).
        background: see `CheckpointWriter.save`.

    Raises:
        CheckpointError: a file could not be written. Names the directory.
    """
    if optimizer is not None and not _has_stepped(optimizer):
        optimizer = None  # Before its first step it has no moments, and what has none cannot be asked for.
    steps: list[int] = []

    def extra() -> None:
        if with_rng:
            torch.save(random_states.get_states(), directory / _rank_file())
        if dist.get_rank() == 0:
            saved = {
                "rollout_id": state.rollout_id,
                "weight_version": state.weight_version,
                "optimizer": optimizer is not None,
                "optimizer_steps": max(steps, default=0),
                "distributed_optimizer": optimizer is not None and _is_distributed(chunks),
                "scheduler": scheduler.state_dict() if scheduler else None,
                "layout": _describe(layout),
            }
            (directory / STATE_FILE).write_text(json.dumps(saved, indent=1))
        dist.barrier()

    try:
        sharded = _sharded_state(chunks, optimizer, is_loading=False, steps=steps)
        writer.save(directory, sharded, extra, background=background)
    except (OSError, CheckpointError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"the trainer's state could not be written to {directory}: {last_line(error)}") from error


def load(
    directory: Path,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    layout: Layout,
    *,
    with_optimizer: bool = True,
    with_rng: bool = True,
) -> Trained:
    """Restores what `save` wrote under this or another layout, on all ranks at once.

    A checkpoint without optimizer state, or `with_optimizer=False`, leaves the optimizer as it is at the start of a
    run; the latter leaves the schedule of the learning rate at its start too, as Megatron does. Random states belong to
    a rank of a layout: under another one the ranks keep those of the seed.

    Raises:
        CheckpointError: a file is missing, cut off or altered. Names the file.
        ConfigError: the model is another one. Names the first tensors that differ.
    """
    check_files(directory)
    saved = json.loads((directory / STATE_FILE).read_text())
    distributed = _is_distributed(chunks)
    with_state = with_optimizer and saved["optimizer"]
    if with_state and saved.get("distributed_optimizer", distributed) != distributed:
        raise ConfigError(
            f"{directory} was saved {'without' if distributed else 'with'} --use-distributed-optimizer, whose state is "
            "another one: go on as it was saved, or start the optimizer anew with --no-load-optim"
        )
    # The distributed optimizer copies into parameters that require gradients.
    with torch.no_grad():
        _load_state(directory, chunks, optimizer if with_state else None, saved["optimizer_steps"])
        if not with_state:
            optimizer.reload_model_params()
    if with_optimizer and saved["scheduler"]:
        scheduler.load_state_dict(saved["scheduler"])
    if with_rng and saved.get("layout", _describe(layout)) == _describe(layout) and (directory / _rank_file()).exists():
        random_states.set_states(torch.load(directory / _rank_file(), weights_only=True))
    return Trained(saved["rollout_id"], saved["weight_version"])


def load_weights(directory: Path, chunks: list[DistributedDataParallel]) -> None:
    """Loads the model alone, from a checkpoint of any run, of the converter or of Megatron itself. Collective.

    Raises:
        CheckpointError, ConfigError: as in `load`.
    """
    if (directory / CHECKSUMS_FILE).exists():
        check_files(directory)
    with torch.no_grad():
        _load_state(directory, chunks, None)


def _load_state(
    directory: Path, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer | None, num_steps: int = 0
) -> None:
    model = _sharded_state(chunks, None, is_loading=True)
    check_fit(directory, model, unwrap(chunks[0]).true_vocab_size)
    sharded = _sharded_state(chunks, optimizer, is_loading=True)
    if optimizer is not None:
        check_optimizer_fit(directory, sharded["optimizer"])
    try:
        loaded = dist_checkpointing.load(sharded, str(directory))
    except (CheckpointingException, CheckpointException, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{directory} does not fit this run's model: {last_line(error)}") from error
    for row, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[_model_key(row, chunks)])
    if optimizer is not None:
        for group in _groups(loaded["optimizer"]):
            group["step"] = num_steps
        optimizer.load_state_dict(loaded["optimizer"])


def _sharded_state(
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
    *,
    is_loading: bool,
    steps: list[int] | None = None,
) -> dict[str, Any]:
    """Megatron's description of what each rank holds. `steps` is given the optimizer's step of each of its groups."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        _model_key(row, chunks): unwrap(chunk).sharded_state_dict(metadata=metadata) for row, chunk in enumerate(chunks)
    }
    if optimizer is not None:
        described = state
        if _is_partly_frozen(chunks):
            # A tensor of all layers, or of all experts, would have holes.
            singly = metadata | {"non_homogeneous_layers": True, "singleton_local_shards": True}
            described = {
                _model_key(row, chunks): unwrap(chunk).sharded_state_dict(metadata=singly)
                for row, chunk in enumerate(chunks)
            }
        held = optimizer.sharded_state_dict(described, is_loading=is_loading, metadata=metadata)
        if steps is not None:
            steps.extend(int(group.get("step", 0)) for group in _groups(held))
        state["optimizer"] = dict_list_map_inplace(_only_sharded, held)
    return state


def _has_stepped(optimizer: MegatronOptimizer) -> bool:
    """Whether any rank has state of it. Collective: a rank may hold no parameter."""
    mine = any(bool(part.optimizer.state) for part in parts(optimizer) if part.optimizer is not None)
    return any(parallel.gather_objects(mine))


def _is_partly_frozen(chunks: list[DistributedDataParallel]) -> bool:
    """Whether any rank has a parameter that is not trained. Collective."""
    mine = any(not parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())
    return any(parallel.gather_objects(mine))


def _only_sharded(value: Any) -> Any:
    """What is not a part of a sharded tensor stays with the rank: not saved, and not loaded."""
    return value if isinstance(value, ShardedBase | LocalNonpersistentObject) else LocalNonpersistentObject(value)


def _groups(state: Any) -> list[dict[str, Any]]:
    """The groups of parameters in an optimizer's state, which count its steps."""
    if not isinstance(state, dict):
        return []
    return [*state.get("param_groups", []), *(group for value in state.values() for group in _groups(value))]


def _is_distributed(chunks: list[DistributedDataParallel]) -> bool:
    return chunks[0].ddp_config.use_distributed_optimizer


def _model_key(row: int, chunks: list[Any]) -> str:
    return f"model{row}" if len(chunks) > 1 else "model"


def _describe(layout: Layout) -> dict[str, Any]:
    return asdict(layout) | {"world_size": dist.get_world_size()}


def _rank_file() -> str:
    return f"rank_{dist.get_rank():05d}.pt"
