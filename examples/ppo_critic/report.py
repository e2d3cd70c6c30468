"""What an example run learned: reward and explained variance, of its first rollouts and of its last ones.

python -m examples.ppo_critic.report outputs/ppo-critic
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colloid.observe.metrics import read_metrics

SHOWN = {
    "mean reward": "rollout/raw_reward",
    "explained variance of the returns by the critic": "train/explained_variance",
    "value loss": "train/value_loss",
}
WINDOW = 3
"""Rollouts that a number is the mean of; fewer where there are fewer."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.ppo_critic.report RUN_DIR")
    print(report(read_metrics(Path(sys.argv[1]))))


def report(records: Sequence[dict[str, Any]]) -> str:
    """A line a metric: first -> last."""
    lines = [f"{'':<48} first ->  last"]
    for label, name in SHOWN.items():
        values = [float(record[name]) for record in records if name in record]
        if values:
            first, last = (sum(part) / len(part) for part in (values[:WINDOW], values[-WINDOW:]))
            lines.append(f"{label:<48}{first:>6.3f} ->{last:>6.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
