"""Writes the quick start's task: the largest of three numbers. Two JSONL files, `train.jsonl` and `heldout.jsonl`.

A row is `{"prompt": [messages], "label": "94"}`. The last message is the beginning of the assistant's reply, which the
model goes on with (prefill): without it a model this small hardly ever answers in the form that is asked for, and there
is nothing to learn from. The system message is empty on purpose: without one the chat template adds its own.

No three numbers, in whatever order, are in both files. The same arguments give the same files.

    python examples/quickstart/make_task.py --output outputs/quickstart-data
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

NUMBERS = range(1, 100)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the quick start's task as two JSONL files.")
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--train", type=int, default=2000, help="training prompts (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=100, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    triples = distinct_triples(random.Random(options.seed))
    for name, count in (("heldout", options.heldout), ("train", options.train)):
        path = options.output / f"{name}.jsonl"
        write_rows(path, [make_row(next(triples)) for _ in range(count)])
        print(f"{path}: {count} prompts")


def distinct_triples(generator: random.Random) -> Iterator[list[int]]:
    """Three different numbers at a time; never the same three again, in any order."""
    seen: set[frozenset[int]] = set()
    while True:
        triple = generator.sample(NUMBERS, 3)
        if (key := frozenset(triple)) not in seen:
            seen.add(key)
            yield triple


def make_row(numbers: Sequence[int]) -> dict:
    """The prompt as messages, and the right answer."""
    return {
        "prompt": [
            {"role": "system", "content": ""},
            {"role": "user", "content": f"Which number is the largest: {', '.join(map(str, numbers))}?"},
            {"role": "assistant", "content": "The largest number is"},
        ],
        "label": str(max(numbers)),
    }


def write_rows(path: Path, rows: list[dict]) -> None:
    """Writes the file whole, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
