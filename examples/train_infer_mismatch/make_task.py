"""Writes the example's prompts, `train.jsonl`; and, with `--tiny`, a random model.

A row is `{"prompt": "What is 3 + 4?", "label": "7"}`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.taught_model import SUMS, question
from examples.tiny_model import make_tiny_model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": question(a, b), "label": str(a + b)} for a, b in SUMS]
    (options.output / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.tiny:
        make_tiny_model(options.output / "tiny")


if __name__ == "__main__":
    main()
