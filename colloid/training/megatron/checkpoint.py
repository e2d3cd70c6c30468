"""The trainer's part of a checkpoint.

    common.pt  metadata.json  .metadata  *.distcp    model and optimizer, in Megatron's torch_dist format
    rank_00000.pt                                    random states of a rank
    trainer.json                                     rollout, weight version, schedule
    checksums.json                                   size and xxh3_128 of each file above

Loading checks every file first, so that a damaged one is named rather than half loaded. Nothing is unpickled beyond
what torch's `weights_only` admits, the index of torch_dist apart.
"""

from __future__ import annotations

import json
import queue
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from colloid.errors import CheckpointError
from colloid.training.megatron.model import unwrap

STATE_FILE = "trainer.json"
CHECKSUMS_FILE = "checksums.json"


@dataclass(frozen=True)
class Trained:
    """How far the trainer is."""

    rollout_id: int
    """The last one that was trained."""
    weight_version: int


def save(
    directory: Path,
    state: Trained,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Writes into an existing directory, from all ranks at once.

    Args:
        optimizer: None leaves its state out.

    Raises:
        CheckpointError: a file could not be written. Names the directory.
    """
    try:
        sharded = _sharded_state(chunks, optimizer, is_loading=False)
        dist_checkpointing.save(sharded, str(directory), InProcessSave("torch_dist", 1, thread_count=1))
        torch.save(_random_states(), directory / _rank_file())
        if dist.get_rank() == 0:
            saved = {
                "rollout_id": state.rollout_id,
                "weight_version": state.weight_version,
                "optimizer": optimizer is not None,
                "scheduler": scheduler.state_dict(),
            }
            (directory / STATE_FILE).write_text(json.dumps(saved, indent=1))
        dist.barrier()
        files = sorted(path for path in directory.iterdir() if path.name != CHECKSUMS_FILE)
        checksums = _over_ranks(files, _file_checksum)
        if dist.get_rank() == 0:
            (directory / CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=1))
        dist.barrier()
    except (OSError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(
            f"the trainer's state could not be written to {directory}: {_last_line(error)}"
        ) from error


def load(
    directory: Path,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> Trained:
    """Restores what `save` wrote, on all ranks at once.

    A checkpoint without optimizer state leaves the optimizer as it is at the start of a run. Ranks that the saving run
    did not have keep their random states.

    Raises:
        CheckpointError: a file is missing, cut off or altered, or the model is another one. Names the file.
    """
    _check_files(directory)
    saved = json.loads((directory / STATE_FILE).read_text())
    sharded = _sharded_state(chunks, optimizer if saved["optimizer"] else None, is_loading=True)
    try:
        loaded = dist_checkpointing.load(sharded, str(directory))
    except (CheckpointingException, CheckpointException, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{directory} does not fit this run's model: {_last_line(error)}") from error
    for row, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[_model_key(row, chunks)])
    # The distributed optimizer copies into parameters that require gradients.
    with torch.no_grad():
        if saved["optimizer"]:
            optimizer.load_state_dict(loaded["optimizer"])
        else:
            optimizer.reload_model_params()
    scheduler.load_state_dict(saved["scheduler"])
    if (directory / _rank_file()).exists():
        _set_random_states(torch.load(directory / _rank_file(), weights_only=True))
    return Trained(saved["rollout_id"], saved["weight_version"])


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's strategy, but files are written by this process.

    The original forks (which can hang in a process with Ray's threads) and keeps a manager process for the results
    (which would outlive a killed trainer).
    """

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        filesystem_async._results_queue = queue.SimpleQueue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:
            return request
        transforms = request.async_fn.args[0]
        return request._replace(async_fn=lambda _rank, buckets, results: _write(transforms, buckets, results))


def _write(transforms: list[Any], buckets: list[Any], results: queue.SimpleQueue) -> None:
    """Writes each bucket's file; puts {bucket: results}, or the exception, where Megatron looks for it."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answers, running = queue.SimpleQueue(), queue.Queue()
        running.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, answers, running, use_fsync=True
        )
        answer = answers.get_nowait()[1]
        if isinstance(answer, Exception):
            results.put(answer)
            return
        written[number] = answer
    results.put(written)


def _last_line(error: BaseException) -> str:
    """What went wrong, without the tracebacks and listings that Megatron and torch put into a message."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return lines[-1][:300]


def _sharded_state(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        # Any layout can load it.
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        _model_key(row, chunks): unwrap(chunk).sharded_state_dict(metadata=metadata) for row, chunk in enumerate(chunks)
    }
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _model_key(row: int, chunks: list[Any]) -> str:
    return f"model{row}" if len(chunks) > 1 else "model"


def _rank_file() -> str:
    return f"rank_{dist.get_rank():05d}.pt"


def _random_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _file_checksum(path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"size": size, "xxh3_128": digest.hexdigest()}


def _over_ranks(files: list[Path], function: Callable[[Path], Any]) -> dict[str, Any]:
    """`function` of each file, by name; the files are dealt out to the ranks. Collective."""
    mine = {path.name: function(path) for path in files[dist.get_rank() :: dist.get_world_size()]}
    everyones: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    return {name: value for part in everyones for name, value in part.items()}


def _check_files(directory: Path) -> None:
    """
    Raises:
        CheckpointError: names the first file that is missing or is not as it was written. The same on all ranks.
    """
    path = directory / CHECKSUMS_FILE
    try:
        expected = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read, so this is not a whole checkpoint: {error}") from error

    def problem(file: Path) -> str | None:
        if not file.exists():
            return "is missing"
        wanted = expected[file.name]
        if file.stat().st_size != wanted["size"]:
            return f"has {file.stat().st_size} bytes where {wanted['size']} were written: it is cut off"
        return None if _file_checksum(file) == wanted else "is not what was written: its checksum differs"

    for name, text in sorted(_over_ranks([directory / name for name in sorted(expected)], problem).items()):
        if text is not None:
            raise CheckpointError(f"checkpoint file {directory / name} {text}. Load an earlier checkpoint")
