"""Writing a torch_dist checkpoint: planned by all ranks together, written by each, finished together.

    plan (collective) -> stage (copies on the host) -> write own file -> gather what was written -> .metadata, checksums

The last two can run in a thread while training goes on. The thread's collectives have a group of their own, so that
they never meet those of training; files are written by this very process, since a fork can hang with Ray's threads.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from colloid.checkpoints import FAILED_FILE
from colloid.errors import CheckpointError
from colloid.training.megatron.checkpoint_files import write_checksums

logger = logging.getLogger(__name__)


class StagedSave(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the plan; what it would do in other processes is `write` and `finish`.

    Args:
        copy: whether tensors on the host are copied, so that they may change before they are written.
    """

    def __init__(self, copy: bool):
        super().__init__("torch_dist", 1, thread_count=1)
        self._copy = copy
        self._writer: Any = None
        self._metadata: Any = None
        self._buckets: list[Any] = []

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        # Megatron would start a manager process for the results, which would outlive a killed trainer.
        filesystem_async._results_queue = queue.SimpleQueue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        self._writer, self._metadata, _ = save_state_dict_ret
        for name, key, (texts, tensors) in self._writer.write_buckets:
            self._buckets.append((name, key, (texts, [(item, self._staged(tensor)) for item, tensor in tensors])))
        self._writer.write_buckets = []
        return AsyncRequest(None, (), [])

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return tensor.to("cpu")
        return tensor.clone() if self._copy else tensor

    def write(self) -> list[Any]:
        """Writes this rank's file; returns what `finish` needs of each rank."""
        results = []
        for number, bucket in enumerate(self._buckets):
            answers, running = queue.SimpleQueue(), queue.Queue()
            running.put(number)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                [self._writer.transforms],
                number,
                bucket,
                answers,
                running,
                use_fsync=True,
            )
            answer = answers.get_nowait()[1]
            if isinstance(answer, Exception):
                raise answer
            results.extend(answer)
        self._buckets = []
        return results

    def finish(self, results: list[list[Any]]) -> None:
        """Writes the index, on rank 0."""
        self._writer.finish(self._metadata, results)


class CheckpointWriter:
    """Writes one checkpoint at a time; in the background where asked to."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None

    def save(self, directory: Path, state: dict[str, Any], extra: Callable[[], None], *, background: bool) -> None:
        """Writes `state` (Megatron's sharded state dict) into an existing directory. Collective over all ranks.

        Args:
            extra: writes this rank's other files.
            background: return once everything is copied. Then a file `checksums.json` tells that all is written, and
                `failed.txt` that it could not be.

        Raises:
            CheckpointError: a file could not be written (also: that of the save before, which this one waits for).
        """
        self.wait()
        staged = StagedSave(copy=background)
        dist_checkpointing.save(state, str(directory), staged, async_sharded_save=True)
        extra()
        if dist.get_rank() == 0:
            save_config(CheckpointingConfig(staged.backend, staged.version), str(directory))
        if not background:
            _finish(directory, staged, None)
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        self._thread = threading.Thread(
            target=_finish_in_background, args=(directory, staged, self._group), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _finish_in_background(directory: Path, staged: StagedSave, group: dist.ProcessGroup) -> None:
    try:
        _finish(directory, staged, group)
    except Exception as error:  # Told to the driver, which waits for the files.
        logger.exception("the checkpoint %s could not be written", directory)
        if dist.get_rank() == 0:
            unfinished = directory / f".{FAILED_FILE}"
            unfinished.write_text(str(error))
            unfinished.rename(directory / FAILED_FILE)


def _finish(directory: Path, staged: StagedSave, group: dist.ProcessGroup | None) -> None:
    """Writes, and finishes together.

    Raises:
        CheckpointError: a rank could not write its file. The same on all ranks.
    """
    written: list[Any] = [None] * dist.get_world_size()
    try:
        mine: Any = staged.write()
    except Exception as error:  # whatever the file system raises; the other ranks wait for this one
        mine = f"rank {dist.get_rank()}: {last_line(error)}"
    dist.all_gather_object(written, mine, group=group)
    failures = [result for result in written if isinstance(result, str)]
    if failures:
        raise CheckpointError("; ".join(failures))
    if dist.get_rank() == 0:
        staged.finish(written)
    dist.barrier(group=group)
    write_checksums(directory, group)
    dist.barrier(group=group)


def last_line(error: BaseException) -> str:
    """What went wrong, without the tracebacks and listings that Megatron and torch put into a message."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return lines[-1][:300]
