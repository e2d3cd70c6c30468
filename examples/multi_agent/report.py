"""What the solver and the critic said, in the first and in the last rollout.

python -m examples.multi_agent.report outputs/multi-agent
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from examples.reports import stored


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.multi_agent.report RUN_DIR")
    print(report(Path(sys.argv[1])))


def report(run_dir: Path) -> str:
    """A line a role: first -> last."""
    first, last = (shares(stored(run_dir, place)) for place in (0, -1))
    return "\n".join(f"{what:<40}{first[what]:.0%} -> {last[what]:.0%}" for what in first)


def shares(rows: list[dict]) -> dict[str, float]:
    """Of the rollouts that `rows` hold, two samples each: how many went how."""
    drafts = [row["response"] for row in rows if json.loads(row["metadata"]).get("forked")]
    finals = [row["reward"] for row in rows if not json.loads(row["metadata"]).get("forked")]
    return {
        "the solver gives a number": sum(draft.isdigit() for draft in drafts) / len(drafts),
        "the critic gives the right sentence": sum(finals) / len(finals),
    }


if __name__ == "__main__":
    main()
