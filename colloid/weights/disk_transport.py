"""Weights to engines through files: a Hugging Face directory a version, which the engines read.

    write the directory (the engines go on) -> the user's hook -> pause -> every engine reads it -> continue -> clean up

With the weights lies a file of their checksums, by which an engine notices what did not arrive as it was written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from colloid.engines.checksums import CHECKSUMS_FILE, tensor_checksum
from colloid.engines.control import EngineControl
from colloid.errors import CheckpointError, ColloidError, WeightSyncError
from colloid.weights.engine_update import EngineUpdate
from colloid.weights.hf_directory import write_hf_directory
from colloid.weights.senders import NamedTensors, SendOptions, Sent


class DiskSender:
    """A `WeightSender` of whole checkpoints."""

    def __init__(self, options: SendOptions):
        self._options = options

    def send(self, engines: Sequence[EngineControl], version: int, tensors: NamedTensors) -> Sent:
        with version_directory(self._options, version) as directory:
            return self.send_directory(engines, version, tensors, directory)

    def send_directory(
        self, engines: Sequence[EngineControl], version: int, tensors: NamedTensors, directory: Path
    ) -> Sent:
        """Writes all weights into `directory` and has the engines read them."""
        num_tensors, num_bytes = write_checkpoint(directory, tensors, self._options)
        after_write(self._options, directory, engines)
        body = {"model_path": str(directory), "weight_version": str(version)}
        with EngineUpdate(engines, version, self._options.pause_mode, begins=False) as update:
            update.post("disk", "/update_weights_from_disk", body)
        return Sent(num_tensors, num_bytes, update.seconds_paused)

    def close(self) -> None:
        """Nothing is held between updates."""


@contextmanager
def version_directory(options: SendOptions, version: int) -> Iterator[Path]:
    """Where a version is written; gone afterwards, unless files are kept. What a failed update wrote goes too.

    Raises:
        WeightSyncError: of an OSError or a writer's error inside; names the directory.
    """
    directory = options.disk_dir / f"weight_v{version:06d}"
    keep = False
    try:
        options.disk_dir.mkdir(parents=True, exist_ok=True)
        yield directory
        keep = options.keep_files
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"the weights of version {version} could not be written to {directory}: {error}"
        ) from error
    except CheckpointError as error:  # it names the directory
        raise WeightSyncError(f"weight version {version}: {error}") from error
    finally:
        for leftover in (directory, directory.with_name(f".writing_{directory.name}")):
            if not keep:
                shutil.rmtree(leftover, ignore_errors=True)


def write_checkpoint(directory: Path, tensors: NamedTensors, options: SendOptions) -> tuple[int, int]:
    """Writes a Hugging Face directory with checksums; returns the number of tensors and of their bytes."""
    checksums: dict[str, str] = {}
    num_bytes = 0

    def counted() -> Iterator:
        nonlocal num_bytes
        for name, tensor in tensors:
            tensor = tensor.detach().cpu()  # once, for the checksum and the file
            checksums[name] = tensor_checksum(tensor)
            num_bytes += tensor.nbytes
            yield name, tensor

    write_hf_directory(directory, counted(), options.model_path, shard_bytes=options.buffer_size)
    (directory / CHECKSUMS_FILE).write_text(json.dumps({"tensors": checksums}))
    return len(checksums), num_bytes


def after_write(options: SendOptions, directory: Path, engines: Sequence[EngineControl]) -> None:
    """The user's hook, before the engines are told.

    Raises:
        WeightSyncError: it failed; with its words.
    """
    call: Callable | None = options.post_write
    if call is None:
        return
    try:
        call(str(directory), list(engines))
    except ColloidError as error:
        raise WeightSyncError(f"after the weights were written to {directory}: {error}") from error
