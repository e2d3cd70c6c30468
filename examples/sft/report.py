"""What the model learned: its loss, and how often it says what it was taught.

python -m examples.sft.report outputs/sft
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.reports import first_and_last

SHOWN = {"loss": "train/loss", "says what it was taught": "eval/said"}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.sft.report RUN_DIR")
    print(first_and_last(Path(sys.argv[1]), SHOWN))


if __name__ == "__main__":
    main()
