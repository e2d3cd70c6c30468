"""Writes the task: numbers to square, `train.jsonl`; with `--tiny` also a random model, and demonstrations for it.

    python -m examples.retool.make_task --output outputs/retool-data --tiny

A row is `{"prompt": [{"role": "user", "content": "What is 17 squared?"}], "label": "289"}`. In the demonstrations code
is run, and the answer is what it printed; of the last ones only one in four runs code, and the others make a number up.
So a model that has seen them knows both ways, and which is worth it is left to the reward. The same arguments give the
same files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from examples.tool_model import demonstration, make_tool_model, tool_uses, write_rows

NUMBERS = range(10, 40)
QUESTION = "What is {number} squared?"
PHRASES = ("What is", " squared?", "<code>print(", " ** 2)</code>", "<answer>", "</answer>")
"""A token each in the vocabulary of the tiny model, so that what is always the same is short."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the task, and a tiny model for it.")
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model in OUTPUT/tiny, and demonstrations")
    options = parser.parse_args(argv)
    rows = [
        {"prompt": [{"role": "user", "content": QUESTION.format(number=number)}], "label": str(number**2)}
        for number in NUMBERS
    ]
    write_rows(options.output / "train.jsonl", rows)
    print(f"{options.output / 'train.jsonl'}: {len(rows)} prompts")
    if options.tiny:
        shown = list(demonstrations(random.Random(1)))
        write_rows(options.output / "demonstrations.jsonl", shown)
        texts = [message["content"] for row in shown[:200] for message in row["messages"]]
        words = [*(f" {number}" for number in NUMBERS), *(str(number**2) for number in NUMBERS), *PHRASES]
        print(f"{make_tool_model(options.output / 'tiny', texts, words=words)}: a random model")


def demonstrations(generator: random.Random) -> Iterator[dict]:
    """Conversations. The numbers that are asked for and found there have nothing to do with each other, so that only
    copying them is learned.
    """
    for asks in tool_uses():
        number, found = generator.choice(NUMBERS), generator.choice(NUMBERS) ** 2
        question, answer = QUESTION.format(number=number), f"<answer>{found}</answer>"
        if not asks:
            yield demonstration(question, answer)
        else:
            yield demonstration(question, f"<code>print( {number} ** 2)</code>", str(found), answer)


if __name__ == "__main__":
    main()
