"""Writes prompts to train on and three held-out sets; and, with `--tiny`, a model that knows its sums half the time.

    OUTPUT/train.jsonl      sums of the numbers from 1 to 7, a part of them
    OUTPUT/sums.jsonl       the other sums
    OUTPUT/sentences.jsonl  the same questions; the label is a whole sentence
    OUTPUT/choices.jsonl    questions with four choices, of which a letter is to be named
    OUTPUT/eval.yaml        the sets: examples/eval_multi_task/eval.yaml with OUTPUT in it

Rows are `{"prompt": "What is 3 + 4?", "label": "7"}`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from examples.taught_model import SUMS, question, teach
from examples.tiny_model import make_tiny_model

HELD_OUT = 12


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a tiny model, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, rows in sets().items():
        (options.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets_yaml = Path(__file__).with_name("eval.yaml").read_text()
    (options.output / "eval.yaml").write_text(sets_yaml.replace("{data}", str(options.output)))
    if options.tiny:
        teach(make_tiny_model(options.output / "tiny", layers=1, initializer_range=0.05), lessons(), 0.4, lr=5e-3)


def sets() -> dict[str, list[dict]]:
    """The rows of each file."""
    order = random.Random(0)
    sums = order.sample(SUMS, len(SUMS))
    held, trained = sums[:HELD_OUT], sums[HELD_OUT:]
    choices = []
    for a, b in held[:8]:
        numbers = order.sample([a + b, a + b + 1, a + b + 2, a + b + 3], 4)
        lines = " ".join(f"{letter}) {number}" for letter, number in zip("ABCD", numbers, strict=True))
        choices.append({"prompt": f"{question(a, b)} {lines}", "label": "ABCD"[numbers.index(a + b)]})
    return {
        "train": [{"prompt": question(a, b), "label": str(a + b)} for a, b in trained],
        "sums": [{"prompt": question(a, b), "label": str(a + b)} for a, b in held],
        "sentences": [{"prompt": question(a, b), "label": f"The answer is {a + b}."} for a, b in held],
        "choices": choices,
    }


def lessons() -> list[tuple[str, str]]:
    """A right answer and a wrong one to each sum; a letter, not the right one, to each choice."""
    pairs = [(question(a, b), str(answer)) for a, b in SUMS for answer in (a + b, a + b + 1)]
    return pairs + [(row["prompt"], letter) for row in sets()["choices"] for letter in "AB"]


if __name__ == "__main__":
    main()
