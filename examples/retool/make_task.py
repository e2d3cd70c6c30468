"""Writes the task: products to work out, `train.jsonl`; with `--tiny` also a random model, and demonstrations for it.

    python -m examples.retool.make_task --output outputs/retool-data --tiny

A row is `{"prompt": [{"role": "user", "content": "What is 17 * 23?"}], "label": "391"}`. Of the demonstrations one in
four runs code and answers with what it printed; the others answer with a number that they made up. So a model that has
seen them knows both ways, and which one is worth it is left to the reward. The same arguments give the same files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from examples.tool_model import demonstration, make_tool_model, write_rows

NUMBERS = range(10, 32)
QUESTION = "What is {a} * {b}?"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the task, and a tiny model for it.")
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model in OUTPUT/tiny, and demonstrations")
    options = parser.parse_args(argv)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": [{"role": "user", "content": QUESTION.format(a=a, b=b)}], "label": str(a * b)} for a, b in pairs]
    write_rows(options.output / "train.jsonl", rows)
    print(f"{options.output / 'train.jsonl'}: {len(rows)} prompts")
    if options.tiny:
        shown = list(demonstrations(64 * 150, random.Random(1)))
        write_rows(options.output / "demonstrations.jsonl", shown)
        texts = [message["content"] for row in shown[:500] for message in row["messages"]]
        print(f"{make_tool_model(options.output / 'tiny', texts)}: a random model")


def demonstrations(count: int, generator: random.Random) -> Iterator[dict]:
    """Conversations. What the tool says there is any number, so that only copying it is learned."""
    for place in range(count):
        a, b = generator.choice(NUMBERS), generator.choice(NUMBERS)
        question, number = QUESTION.format(a=a, b=b), generator.randrange(100, 1000)
        answer = f"<answer>{number}</answer>"
        if place % 4:
            yield demonstration(question, answer)
        else:
            yield demonstration(question, f"<code>print({a} * {b})</code>", str(number), answer)


if __name__ == "__main__":
    main()
