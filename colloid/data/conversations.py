"""Conversations to train on (SFT): token ids, and a mask over exactly what the assistant says in them.

What counts is one text: the whole conversation as the chat template renders it. Each assistant message gets a span of
characters of it, and a token is trained if it lies in one:

    <|im_start|>user\\n1 + 1?<|im_end|>\\n<|im_start|>assistant\\n2<|im_end|>\\n
                                                             └──────────┘

A span begins where generation would begin (after the generation prompt), and ends with the token that ends a turn: the
one that the template writes, or, where it writes none, the next role's if the model stops there, or else the
tokenizer's end token, which is added behind the last message.

Both ends come from rendering the conversation up to the message, and only where that is how the whole one begins.
Templates may rewrite earlier turns once others follow (Qwen3 and DeepSeek-R1 drop `<think>` blocks); then the ends are
found by putting a marker in the message's place, and the turn is trained as the whole rendering shows it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from colloid.data.prompts import Messages
from colloid.errors import DataError

MARKER = "colloid-marks-this-message"
STEP_LOSS_MASK = "step_loss_mask"
"""In a message: 0 turns it off."""


@dataclass(frozen=True)
class Conversation:
    """One conversation, tokenised."""

    token_ids: list[int]
    """Up to the last trained token: what is behind it changes nothing."""
    loss_mask: list[int]
    """One entry a token."""
    rewritten: bool
    """Whether the template shows a trained message otherwise than it is generated: it does not begin with the
    generation prompt, or it was shown differently while it was the last.
    """

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.token_ids)


@dataclass(frozen=True)
class _Span:
    start: int
    end: int
    rewritten: bool
    trained: bool


def conversation(
    messages: Messages,
    tokenizer: Any,
    *,
    tools: list | None = None,
    end_ids: Sequence[int] = (),
    **template_kwargs: Any,
) -> Conversation:
    """Renders and tokenises a conversation, and masks all but the assistant's text.

    Args:
        end_ids: tokens that end generation, beside the tokenizer's own end token.

    Raises:
        DataError: nothing is to be trained, the template refuses the messages, or it shows them in a way in which an
            assistant's text cannot be found.
    """
    trained = [_is_trained(message) for message in messages]
    if not any(trained):
        raise DataError("no message of the assistant's is to be trained")
    if not getattr(tokenizer, "is_fast", False):
        raise DataError("SFT needs a fast tokenizer (tokenizer.json): it says where in the text each token lies")
    render = _Renderer(messages, tokenizer, tools, template_kwargs)
    ends = end_tokens(tokenizer, end_ids)
    text, spans = render.whole, []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            spans.append(_span(render, index, trained[index], ends))
            if len(spans) > 1 and spans[-1].start < spans[-2].end:
                raise DataError(f"the chat template shows messages {index} and before out of order")
    last = spans[-1]
    if messages[-1]["role"] == "assistant" and not any(text[: last.end].endswith(end) for end in ends):
        end = tokenizer.eos_token or ""
        text = text[: last.end] + end
        spans[-1] = _Span(last.start, len(text), last.rewritten, last.trained)
    text_spans = [(span.start, span.end) for span in spans if span.trained]
    ids, mask = _tokenise(text[: text_spans[-1][1]], text_spans, tokenizer)
    return Conversation(ids, mask, any(span.rewritten for span in spans if span.trained))


def _is_trained(message: dict[str, Any]) -> bool:
    value = message.get(STEP_LOSS_MASK, 1)
    if value not in (0, 1):
        raise DataError(f"{STEP_LOSS_MASK} must be 0 or 1, and is {value!r}")
    return message["role"] == "assistant" and bool(value)


class _Renderer:
    """The conversation, whole and in part, as text."""

    def __init__(self, messages: Messages, tokenizer: Any, tools: list | None, template_kwargs: dict[str, Any]):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the tokenizer has no chat template to render messages with: use a model (--hf-checkpoint) whose "
                "tokenizer_config.json or chat_template.jinja has one"
            )
        hidden = {STEP_LOSS_MASK}
        self.messages = [{key: value for key, value in row.items() if key not in hidden} for row in messages]
        self._tokenizer, self._tools, self._kwargs = tokenizer, tools, template_kwargs
        self.whole = self._render(self.messages)

    def _render(self, messages: Messages, generation_prompt: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                copy.deepcopy(messages),
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._kwargs,
            )
        except Exception as error:  # Templates are programs, and raise whatever they like.
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def part(self, count: int, generation_prompt: bool = False) -> str | None:
        """The first messages, if the template takes them and that is how the whole conversation begins."""
        try:
            text = self._render(self.messages[:count], generation_prompt)
        except DataError:
            return None
        return text if self.whole.startswith(text) else None

    def around(self, index: int) -> tuple[str | None, str | None]:
        """What stands before a message's content in the whole conversation, and behind the message, found by a marker
        in its place; None: something else does.
        """
        message = self.messages[index]
        found: list[str | None] = [None, None]
        # Without its calls of tools first: they are shown behind the content, and are the assistant's text too.
        for marked in ({"role": message["role"], "content": MARKER}, {**message, "content": MARKER}):
            try:
                text = self._render([*self.messages[:index], marked, *self.messages[index + 1 :]])
            except DataError:
                continue
            if text.count(MARKER) != 1:
                continue
            before, behind = text.split(MARKER)
            if found[0] is None and self.whole.startswith(before):
                found[0] = before
            if found[1] is None and self.whole.endswith(behind) and not marked.get("tool_calls"):
                found[1] = behind
        return found[0], found[1]


def _span(render: _Renderer, index: int, trained: bool, ends: list[str]) -> _Span:
    whole = render.whole
    before, until = render.part(index, generation_prompt=True) if index else None, render.part(index + 1)
    rewritten = until is None or (index > 0 and before is None)
    start, end = len(before) if before is not None else None, len(until) if until is not None else None
    if start is None or end is None:
        before, behind = render.around(index)
        if start is None and before is not None:
            start = len(before)
        if end is None and behind is not None:
            # The end token is the first thing behind the content, if it is there at all.
            end = len(whole) - len(behind)
            end += len(next((token for token in ends if behind.startswith(token)), ""))
    if start is None or end is None or start > end:
        raise DataError(
            f"the chat template shows message {index} in a way in which the assistant's text cannot be found: it is "
            "neither how the conversation up to it ends, nor is its content shown as it is given"
        )
    return _Span(start, _with_end_token(render, index, start, end, ends), rewritten, trained)


def _with_end_token(render: _Renderer, index: int, start: int, end: int, ends: list[str]) -> int:
    """The end of the assistant's text with its end token, and without what the template writes behind that."""
    whole = render.whole
    kept = whole[start:end].rstrip()
    if any(kept.endswith(token) for token in ends):
        return start + len(kept)
    # White space behind it is the template's, unless the content itself ends with it.
    content = render.messages[index].get("content")
    own = len(content) if isinstance(content, str) and whole[start:end].startswith(content) else 0
    end = start + max(len(kept), own)
    following = next((token for token in ends if whole[end:].startswith(token)), None)
    return end if following is None else end + len(following)


def end_tokens(tokenizer: Any, end_ids: Sequence[int]) -> list[str]:
    """Texts of the tokens that end a turn, the longest first."""
    ids = {*end_ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
    names = {tokenizer.convert_ids_to_tokens(one) for one in ids}
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names |= {name for name in special if re.search(r"im_end|eot|eom|end.of.turn|end.of.sentence|end_of_text", name)}
    return sorted(filter(None, names), key=len, reverse=True)


def _tokenise(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of the text, and which of them lie in a span. Where a token crosses an end of one, the parts are tokenised
    one by one, as in generation, where the prompt's tokens are there first.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    bounds = np.unique([0, len(text), *(edge for span in spans for edge in span)])
    # Of each token the stretch between two bounds in which it begins.
    stretch = np.searchsorted(bounds[1:], starts, side="right")
    if (ends <= np.append(bounds[1:], len(text))[stretch]).all():
        trained = [pair in spans for pair in pairwise(bounds.tolist())]
        return list(encoded["input_ids"]), np.asarray([*trained, False])[stretch].astype(int).tolist()
    ids: list[int] = []
    mask: list[int] = []
    for low, high in pairwise(bounds.tolist()):
        part = tokenizer(text[low:high], add_special_tokens=False)["input_ids"]
        ids += part
        mask += [int((low, high) in spans)] * len(part)
    return ids, mask
