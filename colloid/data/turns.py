"""Token ids of a conversation that grows: the whole of it once, then only what was appended.

A turn that was sampled stands in the context as its sampled ids. What the chat template writes behind it is found by
rendering the conversation with a marker in the place of that message, and taking what stands behind the marker:

    …<|im_start|>assistant\\nMARKER<|im_end|>\\n<|im_start|>tool\\n15<|im_end|>\\n<|im_start|>assistant\\n
                                 └───────────────────────── appended ─────────────────────────────┘

The token that ends the turn, if it was sampled, is not written a second time. So the ids equal those of the whole
rendering wherever the template shows earlier turns as they were generated. Where it rewrites them (Qwen3, GLM-4.5 and
DeepSeek-R1 drop `<think>` blocks once the next question comes), the sampled ids stay: they are what was sampled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from colloid.data.conversations import MARKER, end_tokens
from colloid.data.prompts import Messages, render_messages
from colloid.errors import DataError


@dataclass(frozen=True)
class Appended:
    """What stands behind a sampled message."""

    ids: list[int]
    text: str


class TurnRenderer:
    """Renders with one tokenizer's chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        end_ids: tokens that end generation, beside the tokenizer's own end token.
        template_kwargs: arguments of the chat template.
    """

    def __init__(self, tokenizer: Any, *, end_ids: Sequence[int] = (), template_kwargs: dict[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        self._ends = set(tokenizer.convert_tokens_to_ids(end_tokens(tokenizer, end_ids)))

    def prompt(self, messages: Messages, tools: list | None = None) -> tuple[list[int], str]:
        """Ids and text of the whole conversation, up to where generation begins.

        Raises:
            DataError: the template refuses the messages.
        """
        text = self.render(messages, tools)
        return self.text_ids(text), text

    def render(self, messages: Messages, tools: list | None = None) -> str:
        """The text of the whole conversation, up to where generation begins. Templates differ in how they want calls of
        tools; all ways are tried.

        Raises:
            DataError: the template refuses the messages.
        """
        first: DataError | None = None
        for variant in _variants(messages):
            try:
                return render_messages(variant, self._tokenizer, tools=tools, **self._kwargs)
            except DataError as error:
                first = first or error
        assert first is not None
        raise first

    def appended(self, messages: Messages, index: int, last_id: int, tools: list | None = None) -> Appended:
        """What stands behind a sampled message, up to where generation goes on.

        Args:
            index: of the sampled message; at least one message comes behind it.
            last_id: the last token that was sampled of it.

        Raises:
            DataError: the template refuses the messages, or does not show the sampled one.
        """
        marked = [*messages[:index], {"role": "assistant", "content": MARKER}, *messages[index + 1 :]]
        before, marker, behind = self.render(marked, tools).rpartition(MARKER)
        if not marker or MARKER in before:
            raise DataError(
                f"the chat template does not show message {index} (of the assistant's) as it is given, so that what "
                "comes behind it cannot be told from it"
            )
        ids = self.text_ids(behind)
        if ids and (ids[0] == last_id or (last_id in self._ends and ids[0] in self._ends)):
            behind = behind.removeprefix(self.shown(ids[:1]))
            ids = ids[1:]
        return Appended(ids, behind)

    def text(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of sampled ids, without the token that ended them."""
        ids = list(ids)
        if ids and (ids[-1] in self._ends or ids[-1] in self._tokenizer.all_special_ids):
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def shown(self, ids: Sequence[int]) -> str:
        """The text of ids, with all special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, as it is."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _variants(messages: Messages) -> list[Messages]:
    """Where messages hold calls of tools: their arguments as an object and as text, a missing content as it is and as
    an empty text. Else the messages alone.
    """
    if not any(message.get("tool_calls") for message in messages):
        return [messages]
    changes: list[tuple[Callable[[Any], Any], bool]] = [(load, empty) for empty in (False, True) for load in _FORMS]
    return [[_with_calls(message, *change) for message in messages] for change in changes]


def _with_calls(message: dict[str, Any], arguments: Callable[[Any], Any], empty: bool) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    changed = copy.deepcopy(message)
    changed.setdefault("content", None)
    if empty and changed["content"] is None:
        changed["content"] = ""
    for call in changed["tool_calls"]:
        function = call.get("function") or call
        if "arguments" in function:
            function["arguments"] = arguments(function["arguments"])
    return changed


def as_object(arguments: Any) -> Any:
    """A call's arguments as an object, where they are the JSON text of one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


_FORMS = (as_object, _as_text)
