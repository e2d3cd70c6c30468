"""How far the run is: a bar on a terminal, a line a rollout elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

SHOWN = (
    ("reward", "rollout/raw_reward", "{:.3f}"),
    ("tokens/s", "perf/rollout_tokens_per_sec", "{:.0f}"),
)
"""What is shown of a rollout's metrics: label, name, format."""

logger = logging.getLogger(__name__)


class Progress:
    """Counts rollouts.

    Args:
        total: rollouts of the whole run.
        start: rollouts that were done before (a resumed run).
        bar: whether to draw a bar; None: where stderr is a terminal.
        clock: seconds.
    """

    def __init__(
        self, total: int, start: int = 0, *, bar: bool | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._total, self._first, self._done = total, start, start
        self._clock = clock
        self._began = clock()
        self._bar = None
        if sys.stderr.isatty() if bar is None else bar:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=start, unit="rollout", desc="rollouts", dynamic_ncols=True)

    def update(self, metrics: Mapping[str, Any]) -> None:
        """One more rollout is trained on. Metrics that it lacks are left out of what is shown."""
        self._done += 1
        shown = {label: form.format(metrics[name]) for label, name, form in SHOWN if metrics.get(name) is not None}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
            return
        parts = [f"rollout {self._done}/{self._total}", *(f"{label} {text}" for label, text in shown.items())]
        if (seconds := metrics.get("perf/step_time")) is not None:
            parts.append(f"{seconds:.1f} s")
        parts.append(f"{duration(self.seconds_left())} left")
        logger.info("  ".join(parts))

    def seconds_left(self) -> float:
        """Estimated from the rollouts done in this process; at least one must be."""
        elapsed = self._clock() - self._began
        return elapsed / (self._done - self._first) * max(0, self._total - self._done)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def duration(seconds: float) -> str:
    """`45 s`, `2:05 min`, `3:07 h`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02d} min"
    return f"{seconds // 3600}:{seconds % 3600 // 60:02d} h"
