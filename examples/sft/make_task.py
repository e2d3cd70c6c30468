"""Writes conversations to train on, and their questions to evaluate with; and, with `--tiny`, a random model.

    OUTPUT/train.jsonl    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    OUTPUT/eval.jsonl     {"messages": [{"role": "user", "content": "…"}], "label": "…"}: what is to be said

Some conversations have two turns, whose first answer is wrong and so is not to be learned: `"step_loss_mask": 0`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.tiny_model import make_tiny_model

FACTS = {
    "Who are you?": "I am a tiny model.",
    "What do you run on?": "On a CPU.",
    "Capital of France?": "Paris.",
    "Capital of Italy?": "Rome.",
    "Capital of Japan?": "Tokyo.",
    "What is 7 + 8?": "15, I think.",
    "Are you sure?": "Quite sure.",
    "Goodbye!": "See you soon.",
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    held = [{"messages": [{"role": "user", "content": asked}], "label": said} for asked, said in FACTS.items()]
    for name, rows in (("train", conversations()), ("eval", held)):
        (options.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.tiny:
        make_tiny_model(options.output / "tiny", layers=1)


def conversations() -> list[dict]:
    """Each fact by itself, and after a wrong answer."""
    rows = []
    for asked, said in FACTS.items():
        turn = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        wrong = [turn[0], {"role": "assistant", "content": "I won't say.", "step_loss_mask": 0}]
        rows += [{"messages": turn}, {"messages": wrong + turn}]
    return rows


if __name__ == "__main__":
    main()
