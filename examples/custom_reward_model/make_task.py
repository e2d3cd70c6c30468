"""Writes the example's prompts and its reward model; and, with `--tiny`, a model that answers either way.

    OUTPUT/train.jsonl     {"prompt": "What is 3 + 4?"}: no labels, the reward model is all there is to learn from
    OUTPUT/reward-model    a Hugging Face directory with one score a text, learned from preferences
    OUTPUT/tiny            answers `The answer is 7.` half the time, and `7` otherwise

A preference is two answers to the same question, the better one first. The reward model learns from those alone (the
loss of Bradley and Terry: -log sigmoid(score of the better - score of the worse)).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from examples.taught_model import SUMS, question, teach
from examples.tiny_model import make_tiny_model

MAX_STEPS = 200
LOSS_TO_REACH = 0.05


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a tiny model, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    prompts = [json.dumps({"prompt": question(a, b)}) + "\n" for a, b in SUMS]
    (output / "train.jsonl").write_text("".join(prompts))
    train_reward_model(output / "reward-model", preferences())
    if options.tiny:
        bare = [(question(a, b), f"{a + b}") for a, b in SUMS]
        sentences = [(question(a, b), f"The answer is {a + b}.") for a, b in SUMS]
        teach(make_tiny_model(output / "tiny", seed=1, initializer_range=0.05), bare + sentences, loss_to_reach=0.25)


def preferences() -> list[tuple[str, str, str]]:
    """Question, the better and the worse answer: a sentence is better than a number or a sentence that is cut off."""
    numbers = random.Random(0)
    found = []
    for a, b in SUMS:
        sentence = f"The answer is {numbers.randint(2, 14)}."
        found.append((question(a, b), sentence, str(numbers.randint(2, 14))))
        found.append((question(a, b), sentence, sentence[: numbers.randint(0, len(sentence) - 4)]))
    return found


def train_reward_model(directory: Path, pairs: list[tuple[str, str, str]]) -> None:
    """A tiny model with a head of one score, trained until its loss is low enough."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)  # the model is too small for more
    make_tiny_model(directory, family="llama", hidden=32, layers=1, initializer_range=0.05)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    texts = [prompt + better for prompt, better, _ in pairs] + [prompt + worse for prompt, _, worse in pairs]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(MAX_STEPS):
        better, worse = model(**batch).logits[:, 0].chunk(2)
        loss = -torch.nn.functional.logsigmoid(better - worse).mean()
        if loss < LOSS_TO_REACH:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise SystemExit(f"{directory}: the loss is {loss:.3f} after {MAX_STEPS} steps, not {LOSS_TO_REACH}")
    model.save_pretrained(directory)
    print(f"{directory}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
