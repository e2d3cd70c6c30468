"""What a trainer rank records of itself: where its time goes (`torch.profiler`), and its memory.

A profile is one file a target and rollout, `profiles/<target>.rollout<N>.<role><rank>.json.gz` in the run directory, in
Chrome's trace format, for Perfetto or chrome://tracing. Only one profiler can run at a time: targets never overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from colloid.config.profiling import OVERALL, ProfileOptions
from colloid.training.memory_history import MemoryHistory, open_history

logger = logging.getLogger(__name__)


class Recording:
    """Of one rank.

    Args:
        role: `actor` or `critic`: part of the files' names.
        cuda: whether the rank computes on a GPU.
    """

    def __init__(self, options: ProfileOptions, role: str, rank: int, cuda: bool):
        self._options = options
        self._name = f"{role}{rank}"
        self._records = rank in options.ranks
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._memory: MemoryHistory | None = None
        self._rollouts = 0

    def start(self) -> None:
        """Before there is a model, so that its memory is recorded too."""
        if self._records and self._options.recorder is not None:
            self._memory = open_history(self._options.recorder, Path(self._options.memory_dir), self._name)

    @contextmanager
    def rollout(self, rollout_id: int) -> Iterator[None]:
        """Around all that a rank trains of a rollout."""
        try:
            with self.part(OVERALL, rollout_id):
                yield
        except torch.OutOfMemoryError:
            self._end_memory("out of memory")
            raise
        self._rollouts += 1
        if self._rollouts == self._options.memory_rollouts:
            self._end_memory(f"after {self._rollouts} rollouts")

    @contextmanager
    def part(self, target: str, rollout_id: int) -> Iterator[None]:
        """Around a target. In a profile of the whole it is a named range."""
        if not (self._records and target in self._options.targets and rollout_id in self._options.rollouts):
            with record_function(target):
                yield
            return
        profiler = profile(activities=self._activities, record_shapes=True, profile_memory=True)
        with profiler, record_function(target):
            yield
        self._write(profiler, target, rollout_id)

    def close(self) -> None:
        """The run ends."""
        self._end_memory("at the end of the run")

    def _write(self, profiler: profile, target: str, rollout_id: int) -> None:
        path = Path(self._options.profile_dir) / f"{target}.rollout{rollout_id}.{self._name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info("%s of rollout %d is profiled: %s (for ui.perfetto.dev)", target, rollout_id, path)

    def _end_memory(self, when: str) -> None:
        if self._memory is not None:
            memory, self._memory = self._memory, None
            logger.info("memory, recorded until %s: %s", when, memory.finish())
