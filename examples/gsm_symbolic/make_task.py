"""Writes problems of reasoning-gym's gsm_symbolic, to train on and held out; and, with `--tiny`, a random model.

A row is `{"prompt": [{"role": "user", "content": "…"}], "label": "288", "metadata": {"entry": {…}}}`; the entry is what
reasoning-gym's verifier is asked with. The problems are templates of GSM8K with other names and numbers each time, so
that there is no end to them: `--size` says how many, `--seed` which. Held-out ones have another seed.

    python -m examples.gsm_symbolic.make_task --output outputs/gsm-symbolic-data [--dataset gsm_symbolic] [--size 400]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.tiny_model import make_tiny_model

INSTRUCTION = "Think briefly, and end with the number alone in <answer></answer>."
HELD_OUT = 24


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model, in OUTPUT/tiny")
    parser.add_argument("--dataset", default="gsm_symbolic", help="any of reasoning-gym's (default: %(default)s)")
    parser.add_argument("--size", type=int, default=400, help="problems to train on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, size, seed in (("train", options.size, options.seed), ("eval", HELD_OUT, options.seed + 1)):
        with (options.output / f"{name}.jsonl").open("w") as file:
            # Some entries hold fractions among what the problem was made of.
            file.writelines(json.dumps(row, default=str) + "\n" for row in problems(options.dataset, size, seed))
    if options.tiny:
        make_tiny_model(options.output / "tiny", vocab=400, layers=1)


def problems(dataset: str, size: int, seed: int) -> list[dict]:
    """Rows of one of reasoning-gym's data sets."""
    import reasoning_gym

    return [
        {
            "prompt": [{"role": "user", "content": f"{entry['question']}\n{INSTRUCTION}"}],
            "label": entry["answer"],
            "metadata": {"dataset": dataset, "entry": entry},
        }
        for entry in reasoning_gym.create_dataset(dataset, size=size, seed=seed)
    ]


if __name__ == "__main__":
    main()
