"""Writes a corpus and questions about it, `corpus.jsonl` and `train.jsonl`; with `--tiny` also a random model and
demonstrations for it.

    python -m examples.search_r1.make_task --output outputs/search-r1-data --tiny

The facts are made up, so that no model knows them: what is asked for is only found by a search. A row is
`{"prompt": [{"role": "user", "content": "What is the capital of Norelia?"}], "label": "Tamsk"}`. In the demonstrations
each country has any capital, so that looking it up is all that can be learned. Of the last ones only one in four looks
it up, and the others name a city at once: which is worth it is left to the reward. The same arguments give the same
files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.tool_model import demonstration, make_tool_model, tool_uses, write_rows

QUESTION = "What is the capital of {country}?"
FACTS = (
    "The capital of {country} is {city}.",
    "The longest river of {country} is the {other}.",
    "The people of {country} drink {other} tea.",
)
COUNTRIES = [
    f"{first}{last}" for first in ("Nor", "Bel", "Kas", "Ulm", "Zan", "Tor") for last in ("elia", "istan", "ova")
]
CITIES = [f"{first}{last}" for first in ("Tam", "Ris", "Gol", "Hev", "Pax", "Qui") for last in ("sk", "bury", "ford")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes a corpus and questions, and a tiny model for them.")
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a random model in OUTPUT/tiny, and demonstrations")
    options = parser.parse_args(argv)
    generator = random.Random(0)
    capitals = dict(zip(COUNTRIES, generator.sample(CITIES, len(CITIES)), strict=True))
    documents = list(corpus(capitals, generator))
    write_rows(options.output / "corpus.jsonl", documents)
    rows = [
        {"prompt": [{"role": "user", "content": QUESTION.format(country=country)}], "label": city}
        for country, city in capitals.items()
    ]
    write_rows(options.output / "train.jsonl", rows)
    print(f"{options.output}: {len(documents)} documents, {len(rows)} questions")
    if options.tiny:
        shown = list(demonstrations(random.Random(1)))
        write_rows(options.output / "demonstrations.jsonl", shown)
        texts = [message["content"] for row in shown[:200] for message in row["messages"]]
        model = make_tool_model(options.output / "tiny", texts, words=words())
        print(f"{model}: a random model")


def corpus(capitals: dict[str, str], generator: random.Random) -> Iterator[dict]:
    """Three documents a country; only one of them answers the question."""
    for place, (country, city) in enumerate(capitals.items()):
        for number, fact in enumerate(FACTS):
            text = fact.format(country=country, city=city, other=generator.choice(CITIES))
            yield {"id": str(len(FACTS) * place + number), "contents": f'"{country}"\n{text}'}


def demonstrations(generator: random.Random) -> Iterator[dict]:
    """Conversations."""
    for asks in tool_uses():
        country, city = generator.choice(COUNTRIES), generator.choice(CITIES)
        question, answer = QUESTION.format(country=country), f"<answer> {city}</answer>"
        if not asks:
            yield demonstration(question, answer)
        else:
            found = information([f'"{country}"\n{FACTS[0].format(country=country, city=city)}'])
            yield demonstration(question, f"<search>the capital of {country}</search>", found, answer)


def information(texts: Sequence[str]) -> str:
    """How the model is shown what a search found."""
    return "<information>" + "\n".join(texts) + "</information>"


def words() -> list[str]:
    """A token each, so that a name is copied at once, and what is always the same is short."""
    phrases = ["What is the capital of", "the capital of", "The capital of", "<search>", "</search>", "<answer>"]
    return [
        *(f" {name}" for name in (*COUNTRIES, *CITIES)),
        *(f'<information>"{country}"\n' for country in COUNTRIES),
        *(*phrases, "</answer>", "</information>"),
    ]


if __name__ == "__main__":
    main()
