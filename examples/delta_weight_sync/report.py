"""What the updates of an example run moved.

python -m examples.delta_weight_sync.report outputs/delta-weight-sync
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colloid.observe.metrics import read_metrics

BYTES, SHARE, SECONDS = (f"perf/update_weights_{name}" for name in ("bytes", "share", "time"))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.delta_weight_sync.report RUN_DIR")
    print(report(read_metrics(Path(sys.argv[1]))))


def report(records: Sequence[dict[str, Any]]) -> str:
    """A line an update after a training step; the share is that of all bytes of the weights."""
    lines = ["update       bytes    share  seconds"]
    for number, record in enumerate((record for record in records if BYTES in record), 1):
        lines.append(f"{number:>6}{record[BYTES]:>12,.0f}{record[SHARE]:>9.2%}{record[SECONDS]:>9.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
