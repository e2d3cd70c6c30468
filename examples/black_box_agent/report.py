"""What the agents came to: reward, turns, and whether training saw what was sampled.

python -m examples.black_box_agent.report outputs/black-box-agent
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from examples.reports import first_and_last, stored

SHOWN = {
    "mean reward": "rollout/raw_reward",
    "turns of an episode": "multi_turn/turns/mean",
    "difference of log-probs, trainer and engine": "train/train_rollout_logprob_abs_diff",
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.black_box_agent.report RUN_DIR")
    print(report(Path(sys.argv[1])))


def report(run_dir: Path) -> str:
    """A line a metric, and a line a client: first -> last."""
    lines = [first_and_last(run_dir, SHOWN)]
    first, last = (by_client(stored(run_dir, place)) for place in (0, -1))
    both = [client for client in sorted(first) if client in last]
    lines += [f"{'mean reward, with ' + client:<44}{first[client]:>8.3f} -> {last[client]:.3f}" for client in both]
    return "\n".join(lines)


def by_client(rows: list[dict]) -> dict[str, float]:
    """The mean reward of each client's episodes; a FAILED one has none."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        if row["reward"] is not None:
            rewards.setdefault(json.loads(row["metadata"])["client"], []).append(row["reward"])
    return {client: sum(values) / len(values) for client, values in rewards.items()}


if __name__ == "__main__":
    main()
