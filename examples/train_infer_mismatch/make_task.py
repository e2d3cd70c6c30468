"""Writes the example's prompts, 81 sums, `train.jsonl`; and, with `--tiny`, a random model.

    python -m examples.train_infer_mismatch.make_task --output outputs/train-infer-mismatch-data --tiny

The same arguments give the same files.
"""

from __future__ import annotations

from examples.prompts_task import SUMS, write_task


def main() -> None:
    write_task(SUMS)


if __name__ == "__main__":
    main()
