"""Writes the example's prompts, `train.jsonl`; and, with `--tiny`, a model that knows both roles a little.

A row is `{"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "label": "The answer is 7."}`. The tiny model
has been taught both roles, but each only half: as the solver it says `7` or `Hm.`; as the critic it makes `The answer
is 7.` of a number, or repeats it, and knows nothing where the solver knew nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.multi_agent.generate import review
from examples.taught_model import question, teach
from examples.tiny_model import make_tiny_model

SUMS = [(a, b) for a in range(1, 5) for b in range(1, 5)]
UNSURE = "Hm."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a tiny model, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": [{"role": "user", "content": question(a, b)}], "label": f"The answer is {a + b}."} for a, b in SUMS
    ]
    (options.output / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.tiny:
        model = make_tiny_model(options.output / "tiny", layers=1, initializer_range=0.05)
        teach(model, lessons(), loss_to_reach=0.25, lr=5e-3, chat=True)


def lessons() -> list[tuple[str, str]]:
    """What is said to each role, and one of the answers that it gives."""
    pairs = []
    for a, b in SUMS:
        asked, right = question(a, b), str(a + b)
        pairs += [(asked, right), (asked, UNSURE), (review(asked, UNSURE), UNSURE)]
        pairs += [(review(asked, right), f"The answer is {right}."), (review(asked, right), right)]
    return pairs


if __name__ == "__main__":
    main()
