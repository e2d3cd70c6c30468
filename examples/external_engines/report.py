"""How fast responses came from how many engines, and whether every sample is there once.

python -m examples.external_engines.report outputs/external-engines
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from colloid.observe.metrics import read_metrics
from examples.reports import stored

ENGINES, SPEED = "engine/alive", "perf/rollout_tokens_per_sec"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.external_engines.report RUN_DIR")
    run_dir = Path(sys.argv[1])
    records = read_metrics(run_dir)
    print(speeds(records))
    text, complete = samples(stored(run_dir, place) for place in range(len(records)))
    print(text)
    sys.exit(not complete)


def speeds(records: Sequence[dict[str, Any]]) -> str:
    """A line for each time that the number of engines stayed the same. The first rollout of each is left out of the
    mean, where there are others: it is that in which an engine came or went.
    """
    lines = ["engines      rollouts  tokens/s"]
    for engines, group in groupby(records, key=lambda record: record[ENGINES]):
        part = list(group)
        rollouts = f"{part[0]['step']} to {part[-1]['step']}"
        measured = part[1:] or part
        speed = sum(record[SPEED] for record in measured) / len(measured)
        lines.append(f"{engines:>7.0f}{rollouts:>14}{speed:>10.0f}")
    failed = sum(record["rollout/num_failed_samples"] for record in records)
    last = records[-1]
    lines.append(f"joined {last['engine/joined']:.0f}, left {last['engine/left']:.0f}, failed samples {failed:.0f}")
    return "\n".join(lines)


def samples(rollouts: Iterable[list[dict[str, Any]]]) -> tuple[str, bool]:
    """What to say of the stored samples, and whether each was generated whole and is there once."""
    rows = [row for rollout in rollouts for row in rollout]
    count = Counter(row["index"] for row in rows)
    lost = len(set(range(max(count) + 1)) - set(count))
    doubled = sum(times > 1 for times in count.values())
    empty = sum(not row["response_length"] for row in rows)
    text = f"{len(rows)} samples: {lost} lost, {doubled} doubled, {empty} without a response"
    return text, not (lost or doubled or empty)


if __name__ == "__main__":
    main()
