"""Where metrics go beside `metrics.jsonl`: a tracker is handed every line of it, in order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from colloid.config.tracking import WandbOptions


class Tracker(Protocol):
    """One receiver of a run's metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step (the rollout id); values may be NaN or infinite."""

    def close(self) -> None:
        """Called once, when the run has ended well."""


def open_trackers(wandb: WandbOptions | None, run_dir: str | Path, *, resumed: bool) -> list[Tracker]:
    """The trackers that a run asks for, beside TensorBoard, which it always has.

    Args:
        resumed: the run goes on from a checkpoint in `run_dir`.

    Raises:
        ConfigError: one cannot be reached.
    """
    if wandb is None:
        return []
    from colloid.observe.wandb import WandbTracker  # not before: it is an extra

    return [WandbTracker(wandb, run_dir, resumed=resumed)]
