"""What examples share that need no more than prompts: `train.jsonl` and, with `--tiny`, a random model beside it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.tiny_model import make_tiny_model

SUMS = [{"prompt": f"What is {a} + {b}?", "label": str(a + b)} for a in range(1, 10) for b in range(1, 10)]


def write_task(rows: Sequence[dict[str, Any]], argv: Sequence[str] | None = None, **tiny: Any) -> None:
    """Writes rows to OUTPUT/train.jsonl and, with `--tiny`, a model to OUTPUT/tiny. The same rows give the same files.

    Args:
        rows: prompts, and what belongs to them.
        argv: the command line: `--output OUTPUT [--tiny]`.
        tiny: what the model is, see `make_tiny_model`.
    """
    parser = argparse.ArgumentParser(description="Writes the task, and a tiny model for it.")
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a tiny random model, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} prompts")
    if options.tiny:
        print(f"{make_tiny_model(options.output / 'tiny', **tiny)}: a random model")
