"""Writes the example's task: 162 prompts, `train.jsonl`; and, with `--tiny`, a random model that learns it on a CPU.

    python -m examples.ppo_critic.make_task --output outputs/ppo-critic-data --tiny

A row is `{"prompt": "What is 7 + 8?", "label": "1.0"}`. There is no right answer: `reward.py` asks for digits, and the
label is what an answer of digits alone is worth, which the kind of question tells.
"""

from __future__ import annotations

from examples.prompts_task import write_task

QUESTIONS = {"What is {a} + {b}?": "1.0", "Guess a number from {a} to {b}!": "0.4"}
"""What an answer is worth, by kind of question."""


def main() -> None:
    rows = [
        {"prompt": prompt.format(a=a, b=b), "label": worth}
        for a in range(1, 10)
        for b in range(1, 10)
        for prompt, worth in QUESTIONS.items()
    ]
    write_task(rows, vocab=300, layers=1)


if __name__ == "__main__":
    main()
