"""Writes the example's task: 81 sums, `train.jsonl`; and, with `--tiny`, a random model that learns it on a CPU.

    python -m examples.fully_async.make_task --output outputs/fully-async-data --tiny

The same arguments give the same files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.tiny_model import make_tiny_model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the task, and a tiny model for it.")
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model of one layer, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"What is {a} + {b}?", "label": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    (options.output / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.output / 'train.jsonl'}: {len(rows)} prompts")
    if options.tiny:
        print(f"{make_tiny_model(options.output / 'tiny', vocab=300, layers=1)}: a random model")


if __name__ == "__main__":
    main()
