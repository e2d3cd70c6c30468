"""Writes the example's task: 81 sums, `train.jsonl`; and, with `--tiny`, a random model that learns it on a CPU.

    python -m examples.reproducibility.make_task --output outputs/reproducibility-data --tiny

The same arguments give the same files.
"""

from __future__ import annotations

from examples.prompts_task import SUMS, write_task


def main() -> None:
    write_task(SUMS, vocab=300, layers=1)


if __name__ == "__main__":
    main()
