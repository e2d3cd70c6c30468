"""Writes the example's task: 81 sums, `train.jsonl`; and, with `--tiny`, a random model, large enough to keep an engine
busy.

    python -m examples.external_engines.make_task --output outputs/external-engines-data --tiny

The same arguments give the same files.
"""

from __future__ import annotations

from examples.prompts_task import SUMS, write_task


def main() -> None:
    write_task(SUMS, hidden=256, layers=4)


if __name__ == "__main__":
    main()
