"""Writes the example's task: 162 prompts, `train.jsonl`; and, with `--tiny`, a random model that learns it on a CPU.

    python examples/ppo_critic/make_task.py --output outputs/ppo-critic-data --tiny

A row is `{"prompt": "What is 7 + 8?", "label": "1.0"}`. There is no right answer: `reward.py` asks for digits, and the
label is what an answer of digits alone is worth, which the kind of question tells. The same arguments give the same
files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_model import make_tiny_model  # noqa: E402

QUESTIONS = {"What is {a} + {b}?": "1.0", "Guess a number from {a} to {b}!": "0.4"}
"""What an answer is worth, by kind of question."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the task, and a tiny model for it.")
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model of one layer, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": prompt.format(a=a, b=b), "label": worth}
        for a in range(1, 10)
        for b in range(1, 10)
        for prompt, worth in QUESTIONS.items()
    ]
    (options.output / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.output / 'train.jsonl'}: {len(rows)} prompts")
    if options.tiny:
        print(f"{make_tiny_model(options.output / 'tiny', vocab=300, layers=1)}: a random model")


if __name__ == "__main__":
    main()
