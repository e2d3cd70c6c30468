"""Tiny models that some seconds of supervised training taught something, so that there is something to reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SUMS = [(a, b) for a in range(1, 8) for b in range(1, 8)]
MAX_STEPS = 400


def question(a: int, b: int) -> str:
    """The sum as a question."""
    return f"What is {a} + {b}?"


def teach(
    directory: Path, pairs: Sequence[tuple[str, str]], loss_to_reach: float, *, lr: float = 3e-3, chat: bool = False
) -> Path:
    """Trains a model, in place, to answer, until its loss a token of the answers is low enough.

    Args:
        directory: a Hugging Face directory, as `make_tiny_model` writes it.
        pairs: what is asked, and an answer. The same question may come with several answers.
        chat: ask through the chat template, as the message of a user.

    Returns:
        The directory.

    Raises:
        SystemExit: the loss was not reached in `MAX_STEPS` steps.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # the model is too small for more
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    asked = [rendered(tokenizer, prompt) if chat else prompt for prompt, _ in pairs]
    before = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in asked]
    after = [tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids for _, answer in pairs]
    width = max(len(one) + len(other) for one, other in zip(before, after, strict=True))
    tokens = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), -100)
    for row, (prompt, answer) in enumerate(zip(before, after, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(MAX_STEPS):
        loss = model(input_ids=tokens, labels=labels).loss
        if loss < loss_to_reach:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise SystemExit(f"{directory}: the loss is {loss:.3f} after {MAX_STEPS} steps, not {loss_to_reach}")
    model.save_pretrained(directory)
    print(f"{directory}: loss {loss:.3f}")
    return directory


def rendered(tokenizer, prompt: str) -> str:
    """A user's message in the chat template, up to where the assistant begins."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
