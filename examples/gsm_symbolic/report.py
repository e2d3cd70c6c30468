"""What a run learned: the reward, on the problems that it trained on and on held-out ones, and answers.

python -m examples.gsm_symbolic.report outputs/gsm-symbolic
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.reports import REWARD, first_and_last, some_responses

SHOWN = {**REWARD, "on held-out problems": "eval/held_out", "cut off": "rollout/truncated_ratio"}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.gsm_symbolic.report RUN_DIR")
    run_dir = Path(sys.argv[1])
    print(first_and_last(run_dir, SHOWN), some_responses(run_dir), sep="\n")


if __name__ == "__main__":
    main()
