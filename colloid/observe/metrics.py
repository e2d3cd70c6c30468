"""The metrics of a run: one writer, to `metrics.jsonl`, TensorBoard events and other trackers; and one reader.

Invariants: every line of `metrics.jsonl` is a whole JSON object with `step` (the rollout id); after a
resume there is no line, and no TensorBoard point, past the checkpoint's step.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colloid.observe.tensorboard import TensorBoardTracker
from colloid.observe.trackers import Tracker

METRICS_FILE = "metrics.jsonl"
STEP_TIME = "perf/step_time"
"""In the line of every rollout, and of nothing else."""

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes the metrics of a run to `metrics.jsonl`, as TensorBoard scalars, and to further trackers.

    Args:
        run_dir: where both go; made if need be.
        resume_step: the rollout id of the checkpoint that the run goes on from; what was logged at later steps is cut
            off. None: a new run. Metrics of an earlier one in the same directory are moved to `earlier-<n>/`.
        events_dir: where TensorBoard's events go; None: there too.
        trackers: who gets the metrics beside these two; closed with the writer.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int | None = None,
        trackers: Sequence[Tracker] = (),
        events_dir: str | Path | None = None,
    ):
        self._path = Path(run_dir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        events_dir = self._path.parent if events_dir is None else Path(events_dir)
        events_dir.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            for directory in {self._path.parent, events_dir}:
                _move_earlier_run(directory)
        else:
            cut_metrics(self._path, resume_step)
        self.goes_on = resume_step is not None and self._path.exists()
        """Whether there are metrics of before."""
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        events = TensorBoardTracker(events_dir, None if resume_step is None else resume_step + 1)
        self._trackers: list[Tracker] = [events, *trackers]
        self._noted: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line, and one TensorBoard point a metric. Returns when both are with the operating system, and
        the trackers know.

        Args:
            step: the rollout id.
            metrics: name -> number (also NumPy's, or a tensor of one element). NaN and infinities are written as null,
                which is all that JSON has for them, and reported in the log.

        Raises:
            ValueError: `step` is among the names.
            TypeError: a value is not a number.
            OSError: the line could not be written (a full disk, say); no part of it is left in the file.
        """
        if "step" in metrics:
            raise ValueError("'step' is not a metric's name: it is the field that holds the rollout id")
        values = numbers({**metrics, **self._noted})
        self._noted = {}
        for name, value in values.items():
            if not math.isfinite(value):
                logger.warning("%s is %s at step %d", name, value, step)
        record = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._append(json.dumps({"step": int(step), **record}).encode() + b"\n")
        for tracker in self._trackers:
            tracker.log(step, values)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Has these in the next line too."""
        self._noted |= metrics

    def close(self) -> None:
        """Closes the file and the trackers. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            for tracker in self._trackers:
                tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, size)
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, in order; [] where there is none.

    A last line without its end (the writer was killed while it wrote) is left out.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in _whole_lines(path)]


def has_logged(run_dir: str | Path, step: int, name: str = "step") -> bool:
    """Whether a run's `metrics.jsonl` has a line of a step, with a metric of this name."""
    return any(record["step"] == step and name in record for record in read_metrics(run_dir))


def numbers(metrics: Mapping[str, Any]) -> dict[str, float | int]:
    """The metrics as Python's numbers.

    Raises:
        TypeError: one is not a number.
    """
    return {name: _number(name, value) for name, value in metrics.items()}


def cut_metrics(path: str | Path, last_step: int) -> int:
    """Removes the lines with `step` > `last_step`, and a torn last line, from a metrics file: all at once, or nothing.

    Returns:
        How many lines were removed.
    """
    path = Path(path)
    if not path.exists():
        return 0
    lines = _whole_lines(path)
    kept = [line for line in lines if json.loads(line)["step"] <= last_step]
    data = b"".join(line + b"\n" for line in kept)
    if data != path.read_bytes():
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return len(lines) - len(kept)


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def _number(name: str, value: Any) -> float | int:
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, bool) else value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name}: {value!r} is not a number") from error


def _move_earlier_run(run_dir: Path) -> None:
    """Puts the metrics of an earlier run into a directory of their own, where TensorBoard shows them as another run."""
    earlier = [path for path in run_dir.iterdir() if path.name == METRICS_FILE or "tfevents" in path.name]
    if not earlier:
        return
    number = 1
    while (target := run_dir / f"earlier-{number}").exists():
        number += 1
    target.mkdir()
    for path in earlier:
        path.rename(target / path.name)
    logger.warning("%s held the metrics of an earlier run: they are now in %s", run_dir, target)
