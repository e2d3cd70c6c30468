"""Writes the example's models and prompts: a teacher that answers sums in a sentence, a student that often does not.

Both are tiny models that some seconds of supervised training taught the sums of two digits. Asked `What is 3 + 4?` the
teacher always says `The answer is 7.`, the student says so half the time, and `7` otherwise. Nothing is downloaded:

    OUTPUT/student OUTPUT/teacher   Hugging Face directories with the same tokenizer
    OUTPUT/prompts.jsonl            {"prompt": "What is 3 + 4?"}: no labels, the teacher is all there is to learn from

    python -m examples.on_policy_distillation.make_task --output outputs/distillation-data
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.taught_model import SUMS, question, teach
from examples.tiny_model import make_tiny_model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument(
        "--teacher-hidden", type=int, default=96, help="width (default: %(default)s; the student's: 64)"
    )
    options = parser.parse_args(argv)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    prompts = [json.dumps({"prompt": question(a, b)}) + "\n" for a, b in SUMS]
    (output / "prompts.jsonl").write_text("".join(prompts), encoding="utf-8")
    bare = [(question(a, b), f"{a + b}") for a, b in SUMS]
    sentences = [(question(a, b), f"The answer is {a + b}.") for a, b in SUMS]
    student = make_tiny_model(output / "student", seed=1, initializer_range=0.05)
    teach(student, bare + sentences, loss_to_reach=0.25)
    teacher = make_tiny_model(output / "teacher", seed=2, initializer_range=0.05, hidden=options.teacher_hidden)
    teach(teacher, sentences, loss_to_reach=0.02)


if __name__ == "__main__":
    main()
