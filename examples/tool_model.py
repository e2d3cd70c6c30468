"""What the examples of tools share: a tiny random model with the words of their task, and conversations to teach it.

A demonstration is `{"messages": […]}`, for `--loss-type sft_loss`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from examples.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_model


def make_tool_model(path: Path, texts: Sequence[str], *, words: Sequence[str] = (), vocab: int = 384) -> Path:
    """A random Qwen2 of one layer, whose tokenizer is trained on `texts`: digits are tokens of their own.

    Args:
        words: are tokens of their own too, with the space in front of them.
        vocab: tokens at most, `words` not counted.
    """
    size = 8 * -(-(vocab + len(words) + 3) // 8)
    make_tiny_model(path, "qwen2", vocab=size, hidden=64, layers=1)
    make_tokenizer(path, texts, words, vocab)
    return path


def make_tokenizer(path: Path, texts: Sequence[str], words: Sequence[str], vocab: int) -> None:
    """Byte-level BPE with a ChatML template, saved to `path`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    roles = ("user\n", "assistant\n", "tool\n")
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*roles, *words)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def tool_uses(copied: int = 64 * 56, mixed: int = 64 * 24) -> Iterator[bool]:
    """Which demonstrations use the tool: at first all, which teaches its use, then one in four, which spoils it."""
    yield from (place < copied or place % 4 == 0 for place in range(copied + mixed))


def demonstration(question: str, *turns: str) -> dict:
    """A question, then what the assistant says and what the tool says, in turns."""
    roles = ("assistant", "tool")
    said = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    return {"messages": [{"role": "user", "content": question}, *said]}


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """A JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
