"""What all transports of weights to the engines have in common (colloid/weights/transports.py lists them).

The same named tensors go through all of them. A sender belongs to the rank that has the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from colloid.engines.control import EngineControl

NamedTensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Sent:
    """What an update was."""

    num_tensors: int
    num_bytes: int
    """That were moved to one engine."""
    seconds_paused: float
    num_weight_bytes: int | None = None
    """All tensors', where fewer bytes were moved."""

    @property
    def share(self) -> float:
        """Of the weights' bytes, how much was moved."""
        return self.num_bytes / self.num_weight_bytes if self.num_weight_bytes else 1.0


@dataclass(frozen=True)
class SendOptions:
    """What the senders need to know; the names are those of the options.

    Attributes:
        buffer_size: bytes of a bucket.
        model_path: a Hugging Face directory, whose small files go with weights on disk.
        disk_dir: where weights are written, one directory a version.
        local_dir: the whole checkpoint that deltas are applied to, for engines that don't apply them.
        post_write: `(version_dir, engines)`, called once weights are on disk, before these engines read them.
        engine: their kind, `embedded` or `sglang`.
        keep_buffers: whether shared memory is kept from one update to the next.
    """

    transport: str
    mode: str
    buffer_size: int
    pause_mode: str
    model_path: Path
    disk_dir: Path
    keep_files: bool = False
    local_dir: Path | None = None
    delta_encoding: str = "xor"
    delta_checksum: str = "xxh3-128"
    post_write: Callable[[str, list[EngineControl]], Any] | None = None
    engine: str = "embedded"
    keep_buffers: bool = True


class WeightSender(Protocol):
    """Sends the weights of one rank, version after version."""

    def send(self, engines: Sequence[EngineControl], version: int, tensors: NamedTensors) -> Sent:
        """Brings all engines to a version. May leave `tensors` unfinished where it fails.

        Raises:
            WeightSyncError: names the engines that did not take it. None is left paused.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds between updates."""
        ...
