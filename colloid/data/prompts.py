"""Prompts from data files: read, checked, rendered by the chat template, tokenised, filtered by length.

A row that cannot be used is a `DataError` with file and line (or is counted, with `--skip-bad-rows`). A prompt that is
too long is left out, counted and reported. Each prompt's token ids are computed here, once; nothing tokenises it again.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from colloid.config.prompt_files import PromptFile
from colloid.data.files import Columns, RawRow, place
from colloid.data.reading import LoadOptions, load
from colloid.data.rows import BadRow, Messages, Outcome, PromptDataset, PromptRow, TooLong, Usable
from colloid.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptFormat:
    """How a row becomes a prompt."""

    input_key: str = "prompt"
    label_key: str | None = "label"
    require_label: bool = False
    """Whether a row without `label_key` is an error."""
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    apply_chat_template: bool = False
    """A text becomes one user message; the rendered text is the sample's prompt. Messages are always rendered."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    """Longer prompts are left out."""

    @property
    def columns(self) -> Columns:
        """The columns that matter."""
        required = ((self.input_key, "--input-key"),)
        if self.require_label and self.label_key:
            required += ((self.label_key, "--label-key"),)
        return Columns(required, tuple(filter(None, (self.label_key, self.metadata_key, self.tool_key))))


@functools.lru_cache(maxsize=8)
def load_tokenizer(path: str):
    """The Hugging Face tokenizer in the directory `path`; loaded once a process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def load_prompts(
    files: str | Path | Sequence[str | PromptFile],
    tokenizer: Any,
    prompt_format: PromptFormat,
    options: LoadOptions = LoadOptions(),  # noqa: B008
) -> PromptDataset:
    """All prompts of one or several files (`path` or `path@[a:b]`), in memory.

    Raises:
        DataError: a file is missing or a row cannot be used (with its line), or no row is left.
    """
    dataset, tally = load(files, PromptProcessor(tokenizer, prompt_format), options)
    if tally.num_long:
        logger.warning(
            "%s: %d of %d prompts are longer than %d tokens and are left out (the longest has %d); the limit follows "
            "from --rollout-max-prompt-len, or from the context length less --rollout-max-response-len",
            *(dataset.path, tally.num_long, tally.num_rows, prompt_format.max_tokens, tally.longest),
        )
    return dataset


class PromptProcessor:
    """Rows as prompts: checked, rendered, tokenised."""

    noun = "prompts"
    limit_hint = "Raise --rollout-max-prompt-len, or lower --rollout-max-response-len"

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat):
        self._tokenizer, self._format = tokenizer, prompt_format
        self.max_tokens = prompt_format.max_tokens
        self.columns = prompt_format.columns

    def __call__(self, rows: list[RawRow]) -> list[Outcome]:
        """One outcome a row."""
        outcomes: list[Outcome] = [BadRow("")] * len(rows)
        parsed: list[tuple[int, ParsedRow, str]] = []
        for number, raw in enumerate(rows):
            try:
                row = parse_row(raw, self._format)
                parsed.append((number, row, _rendered(row, self._tokenizer, self._format)))
            except DataError as error:
                outcomes[number] = BadRow(str(error))
        ids_of_rows = _tokenize(self._tokenizer, [text for _, _, text in parsed]) if parsed else []
        for (number, row, text), ids in zip(parsed, ids_of_rows, strict=True):
            outcomes[number] = self._outcome(row, text, ids)
        return outcomes

    def _outcome(self, row: ParsedRow, text: str, ids: list[int]) -> Outcome:
        if not ids:
            return BadRow(f"{row.where}: the prompt has no tokens: {text!r}")
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return TooLong(len(ids))
        digest = xxhash.xxh3_128_digest(orjson.dumps([text, row.label], default=str))
        shown = text if self._format.apply_chat_template else row.prompt
        token_ids = np.asarray(ids, dtype=np.int32)
        return Usable(PromptRow(shown, token_ids, row.label, row.metadata, row.number, row.path), digest)


def render_messages(messages: Messages, tokenizer, *, tools: list | None = None, **template_kwargs: Any) -> str:
    """The text of a conversation that the model goes on with.

    A last message of the assistant's is continued (prefill); else a new assistant message is opened.

    Raises:
        DataError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "prompts are messages, but the tokenizer has no chat template: give prompts as text, or use a model "
            "(--hf-checkpoint) whose tokenizer_config.json or chat_template.jinja has one"
        )
    prefill = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            copy.deepcopy(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
            **template_kwargs,
        )
    except Exception as error:  # Templates are programs, and raise whatever they like.
        raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error


def tokenize_prompt(prompt: str | Messages, tokenizer, *, tools: list | None = None, **template_kwargs: Any) -> list:
    """Ids of one prompt. Text is taken as it is: no special tokens are added."""
    text = prompt if isinstance(prompt, str) else render_messages(prompt, tokenizer, tools=tools, **template_kwargs)
    return _tokenize(tokenizer, [text])[0]


_EXAMPLE = '{"prompt": "What is 7 + 8?", "label": "15"}'


@dataclass(frozen=True)
class ParsedRow:
    """A row of a file, checked but not rendered."""

    path: str
    number: int
    prompt: str | Messages
    label: Any
    metadata: dict[str, Any]

    @property
    def where(self) -> str:
        """How errors name the row."""
        return place(self.path, self.number)


def parse_row(raw: RawRow, prompt_format: PromptFormat) -> ParsedRow:
    """A row, checked.

    Raises:
        DataError: it is not as the format says (with its line).
    """
    where = place(raw.path, raw.number)
    row = _columns(raw, prompt_format) if isinstance(raw.data, dict) else _object(raw.data, where)
    keys = ", ".join(repr(key) for key in row)
    if prompt_format.input_key not in row:
        raise DataError(
            f"{where}: no key {prompt_format.input_key!r}; the row has {keys or 'none'}. Name the prompt's key with "
            "--input-key"
        )
    label = row.get(prompt_format.label_key) if prompt_format.label_key else None
    if prompt_format.require_label and label is None:
        raise DataError(f"{where}: no label under {prompt_format.label_key!r}; the row has {keys}. Check --label-key")
    metadata = row.get(prompt_format.metadata_key)
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(f"{where}: {prompt_format.metadata_key!r} must be an object, and is {_kind(metadata)}")
    metadata = dict(metadata or {})
    tools = row.get(prompt_format.tool_key)
    if tools is not None:
        if not isinstance(tools, list):
            raise DataError(f"{where}: {prompt_format.tool_key!r} must be a list of tools, and is {_kind(tools)}")
        metadata["tools"] = tools
    prompt = row[prompt_format.input_key]
    _check_prompt(prompt, f"{where}: {prompt_format.input_key!r}")
    return ParsedRow(raw.path, raw.number, prompt, label, metadata)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}: {_shown(line.decode('utf-8', 'replace'))}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object like {_EXAMPLE}, and this is {_kind(row)}")
    return row


def _columns(raw: RawRow, prompt_format: PromptFormat) -> dict[str, Any]:
    """Columns as JSON would have them: keys that only other rows have are not there; objects may be JSON texts."""
    row = dict(raw.data)
    for key in (prompt_format.metadata_key, prompt_format.tool_key):
        if isinstance(row.get(key), str):
            row[key] = _json_text(row[key], f"{place(raw.path, raw.number)}: {key!r}")
    for key in (prompt_format.input_key, prompt_format.tool_key):
        if isinstance(row.get(key), list):
            row[key] = _without_nulls(row[key])
    return row


def _json_text(text: str, where: str) -> Any:
    try:
        return orjson.loads(text) if text else None
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where} is a text that is not JSON: {error}: {_shown(text)}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where} is an empty text")
        return
    if not isinstance(prompt, list):
        raise DataError(f"{where} must be a text or a list of messages, and is {_kind(prompt)}")
    if not prompt:
        raise DataError(f"{where} is an empty list of messages")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                f'{where} must hold messages like {{"role": "user", "content": "…"}}, not {_shown(message)}'
            )


def _rendered(row: ParsedRow, tokenizer: Any, prompt_format: PromptFormat) -> str:
    if isinstance(row.prompt, str):
        if not prompt_format.apply_chat_template:
            return row.prompt
        messages = [{"role": "user", "content": row.prompt}]
    else:
        messages = row.prompt
    try:
        tools = row.metadata.get("tools")
        return render_messages(messages, tokenizer, tools=tools, **prompt_format.chat_template_kwargs)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error


def _tokenize(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return f"{names.get(type(value), 'a number')}: {_shown(value)}"


def _shown(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text if len(text) <= 80 else text[:77] + "…"
