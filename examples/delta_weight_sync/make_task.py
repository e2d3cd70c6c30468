"""Writes the example's task: 81 sums, `train.jsonl`; and, with `--tiny`, a random model of two layers.

    python -m examples.delta_weight_sync.make_task --output outputs/delta-weight-sync-data --tiny

The same arguments give the same files.
"""

from __future__ import annotations

from examples.prompts_task import SUMS, write_task


def main() -> None:
    write_task(SUMS, vocab=2000, hidden=256, layers=2)


if __name__ == "__main__":
    main()
