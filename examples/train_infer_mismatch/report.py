"""How the trainer's log-probs differ from the engine's, run by run.

python -m examples.train_infer_mismatch.report outputs/mismatch-float32 outputs/mismatch-bfloat16 …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from colloid.observe.metrics import read_metrics

SHOWN = {
    "mean |difference| of log-probs": "train/train_rollout_logprob_abs_diff",
    "KL of the engine from the trainer (k3)": "train/mismatch_k3_kl",
    "mean ratio": "train/mismatch_ratio",
    "chi squared, by token": "train/mismatch_chi2_token",
    "TIS: share of clipped weights": "train/tis_clipfrac",
    "mean reward": "rollout/raw_reward",
}


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m examples.train_infer_mismatch.report RUN_DIR ...")
    print(report([Path(one) for one in sys.argv[1:]]))


def report(run_dirs: Sequence[Path]) -> str:
    """A line a metric, a column a run: means over its rollouts; `-` where it has no such metric."""
    runs = [read_metrics(run_dir) for run_dir in run_dirs]
    width = max(len(run_dir.name) for run_dir in run_dirs) + 2
    lines = [f"{'':<40}" + "".join(f"{run_dir.name:>{width}}" for run_dir in run_dirs)]
    for label, name in SHOWN.items():
        columns = [[float(record[name]) for record in records if name in record] for records in runs]
        shown = [f"{sum(values) / len(values):.2e}" if values else "-" for values in columns]
        lines.append(f"{label:<40}" + "".join(f"{text:>{width}}" for text in shown))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
