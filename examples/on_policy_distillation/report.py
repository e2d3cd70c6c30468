"""What the student took over from its teacher: the KL, and its first and last answers.

python -m examples.on_policy_distillation.report outputs/distillation
"""

from __future__ import annotations

import sys
from pathlib import Path

from colloid.observe.metrics import read_metrics


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.on_policy_distillation.report RUN_DIR")
    print(report(Path(sys.argv[1])))


def report(run_dir: Path) -> str:
    """The KL of the first and the last rollout, and what was answered in both."""
    kl = [record["train/opd_kl"] for record in read_metrics(run_dir) if "train/opd_kl" in record]
    files = sorted((run_dir / "rollouts").glob("[0-9]*.parquet"))
    lines = [f"KL to the teacher, first -> last rollout:   {kl[0]:.3f} -> {kl[-1]:.3f}"]
    shares = [f"{sentences(path):.0%}" for path in (files[0], files[-1])]
    lines.append(f"answers in a sentence, as the teacher's:    {shares[0]} -> {shares[1]}")
    for name, path in (("first", files[0]), ("last", files[-1])):
        lines.append(f"{name} answers:  {', '.join(repr(answer) for answer in answers(path)[:4])}")
    return "\n".join(lines)


def sentences(path: Path) -> float:
    """The share of a rollout's answers that are sentences."""
    found = answers(path)
    return sum(answer.startswith("The answer is") for answer in found) / len(found)


def answers(path: Path) -> list[str]:
    """The responses in a rollout's file."""
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path, columns=["response"])["response"].to_pylist()


if __name__ == "__main__":
    main()
