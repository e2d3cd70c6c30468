"""Whether the run whose processes were killed is the undisturbed one, and how long each recovery took.

python -m examples.fault_tolerance.report UNDISTURBED_RUN_DIR RUN_DIR
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from colloid.observe.metrics import read_metrics
from colloid.observe.summary import REWARD, sparkline
from examples.fault_tolerance.kill import KILLS, KILLS_FILE
from examples.reproducibility.compare import differences


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m examples.fault_tolerance.report UNDISTURBED_RUN_DIR RUN_DIR")
    undisturbed, run_dir = map(Path, sys.argv[1:])
    kills = [json.loads(line) for line in (run_dir / KILLS_FILE).read_text().splitlines()]
    print(recoveries(kills, read_metrics(undisturbed)))
    for label, place in (("undisturbed", undisturbed), ("killed", run_dir)):
        print(f"{label:<14}{sparkline([record[REWARD] for record in read_metrics(place)])}  reward")
    missing = {who for _, who in KILLS} - {kill["who"] for kill in kills}
    found = differences(undisturbed, run_dir) + [f"no {who} was killed: the run was too short" for who in missing]
    if found:
        sys.exit("\n".join(found))
    print("no difference")


def recoveries(kills: list[dict[str, Any]], undisturbed: list[dict[str, Any]]) -> str:
    """A line a kill: how long it took until the next rollout was trained; and what a rollout takes otherwise."""
    lines = [f"{'killed':<14}{'after rollout':>14}{'next rollout after':>20}"]
    lines += [f"{kill['who']:<14}{kill['after']:>14}{kill['seconds']:>18.1f} s" for kill in kills]
    usual = statistics.median(record["perf/step_time"] for record in undisturbed)
    lines.append(f"{'nobody':<14}{'':>14}{usual:>18.1f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
