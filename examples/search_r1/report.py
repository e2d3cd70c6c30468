"""What a run learned: the reward, how many turns it took, and how far trainer and engine agree.

python -m examples.search_r1.report outputs/search-r1
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.reports import REWARD, first_and_last, some_responses

SHOWN = {
    **REWARD,
    "turns of a sample": "multi_turn/turns/mean",
    "|log-prob, trainer - engine|": "train/train_rollout_logprob_abs_diff",
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.search_r1.report RUN_DIR")
    run_dir = Path(sys.argv[1])
    print(first_and_last(run_dir, SHOWN), some_responses(run_dir), sep="\n")


if __name__ == "__main__":
    main()
