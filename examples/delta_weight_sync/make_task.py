"""Writes the example's task: 81 prompts, `train.jsonl`; and, with `--tiny`, a random model.

    python examples/delta_weight_sync/make_task.py --output outputs/delta-weight-sync-data --tiny

A row is `{"prompt": "What is 7 + 8?", "label": "15"}`. The same arguments give the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_model import make_tiny_model  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the task, and a tiny model for it.")
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model of two layers, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"What is {a} + {b}?", "label": str(a + b)} for a in range(1, 10) for b in range(1, 10)]
    (options.output / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.output / 'train.jsonl'}: {len(rows)} prompts")
    if options.tiny:
        print(f"{make_tiny_model(options.output / 'tiny', vocab=2000, hidden=256, layers=2)}: a random model")


if __name__ == "__main__":
    main()
