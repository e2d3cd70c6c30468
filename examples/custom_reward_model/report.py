"""What the policy learned of its reward model: the mean score, and answers.

python -m examples.custom_reward_model.report outputs/custom-reward-model
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.reports import REWARD, first_and_last, some_responses


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.custom_reward_model.report RUN_DIR")
    run_dir = Path(sys.argv[1])
    print(first_and_last(run_dir, REWARD), some_responses(run_dir), sep="\n")


if __name__ == "__main__":
    main()
