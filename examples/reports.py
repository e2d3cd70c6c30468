"""What the reports of the examples are made of: metrics of the first and the last rollout, and stored samples.

python -m examples.reports RUN_DIR [LABEL=METRIC ...]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colloid.observe.metrics import read_metrics

REWARD = {"mean reward": "rollout/raw_reward"}


def first_and_last(run_dir: Path, shown: Mapping[str, str], window: int = 1) -> str:
    """A line a metric: `label   first -> last`, each the mean of `window` records that have the metric."""
    records = read_metrics(run_dir)
    lines = []
    for label, name in shown.items():
        values = [float(record[name]) for record in records if name in record]
        if values:
            first, last = (sum(part) / len(part) for part in (values[:window], values[-window:]))
            lines.append(f"{label:<44}{first:>8.3f} -> {last:.3f}")
    return "\n".join(lines)


def stored(run_dir: Path, place: int) -> list[dict[str, Any]]:
    """The samples of a rollout: 0 is the first one, -1 the last."""
    import pyarrow.parquet

    files = sorted((run_dir / "rollouts").glob("[0-9]*.parquet"))
    return pyarrow.parquet.read_table(files[place]).to_pylist()


def some_responses(run_dir: Path, number: int = 3) -> str:
    """Responses of the first and of the last rollout."""
    lines = []
    for name, place in (("first", 0), ("last", -1)):
        rows = stored(run_dir, place)[:number]
        lines.append(f"{name:<6}answers:  {', '.join(repr(row['response']) for row in rows)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        sys.exit("usage: python -m examples.reports RUN_DIR [LABEL=METRIC ...]")
    shown = dict(one.partition("=")[::2] for one in arguments[1:]) or REWARD
    print(first_and_last(Path(arguments[0]), shown))


if __name__ == "__main__":
    main()
