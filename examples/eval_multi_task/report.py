"""What each evaluation set measured, first and last: the mean score and pass@k.

python -m examples.eval_multi_task.report outputs/eval-multi-task
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from colloid.observe.metrics import read_metrics
from examples.reports import first_and_last

MEASURED = re.compile(r"eval/(\w+)(/pass@\d+)?")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.eval_multi_task.report RUN_DIR")
    run_dir = Path(sys.argv[1])
    names = {name: None for record in read_metrics(run_dir) for name in record if MEASURED.fullmatch(name)}
    print(first_and_last(run_dir, {name.removeprefix("eval/"): name for name in names}))


if __name__ == "__main__":
    main()
