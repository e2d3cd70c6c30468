"""Writes the example's prompts, `train.jsonl`; and, with `--tiny`, a model that knows the tool a little.

A row is `{"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "label": "7", "metadata": {"client": "openai"}}`.
The tiny model has been taught what to say, but only half: it calls the tool or says `Hm.`, and then repeats what the
tool says, or says `Hm.` again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.taught_model import question, teach
from examples.tool_model import make_tool_model, write_rows

SUMS = [(a, b) for a in range(1, 5) for b in range(1, 5)]
UNSURE = "Hm."
CALL = ('<tool_call>{"name": "add", "arguments": {"a":', ', "b":', "}}</tool_call>")
"""Around the numbers; tokens of their own, so that the model learns in seconds."""
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that shows tools by their names, and calls of them as Qwen's models write them."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory; made if need be")
    parser.add_argument("--tiny", action="store_true", help="also a tiny model, in OUTPUT/tiny")
    options = parser.parse_args(argv)
    rows = [
        {
            "prompt": [{"role": "user", "content": question(a, b)}],
            "label": str(a + b),
            "metadata": {"client": ("openai", "anthropic")[(a + b) % 2]},
        }
        for a, b in SUMS
    ]
    write_rows(options.output / "train.jsonl", rows)
    if options.tiny:
        make_model(options.output / "tiny")


def make_model(path: Path) -> None:
    from transformers import AutoTokenizer

    texts = [*(question(a, b) for a, b in SUMS), UNSURE, "system\nTools: add", "user\n", "assistant\n", "tool\n"]
    make_tool_model(path, texts * 4, words=CALL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    teach(path, lessons(tokenizer), loss_to_reach=0.185, lr=5e-3)


def call(a: int, b: int) -> str:
    """What the model says to call the tool."""
    return f"{CALL[0]} {a}{CALL[1]} {b}{CALL[2]}"


def lessons(tokenizer) -> list[tuple[str, str]]:
    """Conversations up to the assistant's turn, as the chat template shows them, and one of the answers to each."""

    def shown(*messages: dict) -> str:
        tools = [{"type": "function", "function": {"name": "add"}}]
        return tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=True)

    pairs = []
    for a, b in SUMS:
        asked = {"role": "user", "content": question(a, b)}
        called = {"role": "assistant", "content": call(a, b)}
        told = shown(asked, called, {"role": "tool", "content": str(a + b)})
        pairs += [(shown(asked), call(a, b)), (shown(asked), UNSURE), (told, str(a + b)), (told, UNSURE)]
    return pairs


if __name__ == "__main__":
    main()
