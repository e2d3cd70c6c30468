"""Prompts from JSONL files: read, checked, rendered by the chat template, tokenised, filtered by length.

A row that cannot be used is a `DataError` with file and line. A prompt that is too long is left out, counted and
reported. Each prompt's token ids are computed here, once; nothing tokenises it again.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from colloid.errors import DataError

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
TOKENIZE_ROWS = 1000


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


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a data set."""

    prompt: str | Messages
    """What the sample shows: text, or messages where they were given without `apply_chat_template`."""
    token_ids: np.ndarray
    """int32 [prompt length]."""
    label: Any
    metadata: dict[str, Any]
    line: int


@dataclass(frozen=True)
class PromptDataset:
    """The prompts of one file, in its order."""

    path: str
    rows: list[PromptRow]
    num_filtered: int
    fingerprint: str
    """Changes when a prompt or label changes."""

    def __len__(self) -> int:
        return len(self.rows)

    def unlabelled_line(self) -> int | None:
        """The first line without a label; None if all have one."""
        return next((row.line for row in self.rows if row.label is None), None)

    def has_labels(self) -> bool:
        return any(row.label is not None for row in self.rows)


@functools.lru_cache(maxsize=8)
def load_tokenizer(path: str):
    """The Hugging Face tokenizer in the directory `path`; loaded once a process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def load_prompts(path: str | Path, tokenizer, prompt_format: PromptFormat) -> PromptDataset:
    """Reads a JSONL file, one object a line; empty lines are skipped.

    Raises:
        DataError: the file is missing or a row cannot be used (with its line), or no row is left.
    """
    rows: list[PromptRow] = []
    num_filtered, num_rows, longest = 0, 0, 0
    digest = xxhash.xxh3_128()
    for chunk in _chunks(parsed_rows(Path(path), prompt_format), TOKENIZE_ROWS):
        texts = [_rendered(row, tokenizer, prompt_format, f"{path}:{row.line}") for row in chunk]
        for row, text, ids in zip(chunk, texts, _tokenize(tokenizer, texts), strict=True):
            num_rows += 1
            longest = max(longest, len(ids))
            if not ids:
                raise DataError(f"{path}:{row.line}: the prompt has no tokens: {text!r}")
            if prompt_format.max_tokens is not None and len(ids) > prompt_format.max_tokens:
                num_filtered += 1
                continue
            digest.update(orjson.dumps([text, row.label], default=str))
            shown = text if prompt_format.apply_chat_template else row.prompt
            rows.append(PromptRow(shown, np.asarray(ids, dtype=np.int32), row.label, row.metadata, row.line))
    if not num_rows:
        raise DataError(f"{path}: the file has no rows. It needs one JSON object a line, like " + _EXAMPLE)
    if num_filtered:
        logger.warning(
            "%s: %d of %d prompts are longer than %d tokens and are left out (the longest has %d); the limit follows "
            "from --rollout-max-prompt-len, or from the context length less --rollout-max-response-len",
            *(path, num_filtered, num_rows, prompt_format.max_tokens, longest),
        )
    if not rows:
        raise DataError(
            f"{path}: all {num_rows} prompts are longer than {prompt_format.max_tokens} tokens, none is left. "
            "Raise --rollout-max-prompt-len, or lower --rollout-max-response-len"
        )
    return PromptDataset(str(path), rows, num_filtered, digest.hexdigest())


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

    line: int
    prompt: str | Messages
    label: Any
    metadata: dict[str, Any]


def parsed_rows(path: Path, prompt_format: PromptFormat) -> Iterator[ParsedRow]:
    """The rows of a JSONL file; empty lines are skipped.

    Raises:
        DataError: the file is missing or a row is not as the format says (with its line).
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file (working directory {Path.cwd()}). Check --prompt-data")
    if path.is_dir() or path.suffix in (".parquet", ".arrow", ".csv"):
        raise DataError(f"{path}: only JSONL files are supported yet: one JSON object a line, like {_EXAMPLE}")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_row(line, number, f"{path}:{number}", prompt_format)


def _parse_row(line: bytes, number: int, where: str, prompt_format: PromptFormat) -> ParsedRow:
    try:
        row = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}: {_shown(line.decode('utf-8', 'replace'))}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object like {_EXAMPLE}, and this is {_kind(row)}")
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
    return ParsedRow(number, prompt, label, metadata)


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


def _rendered(row: ParsedRow, tokenizer, prompt_format: PromptFormat, where: str) -> str:
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
        raise DataError(f"{where}: {error}") from error


def _tokenize(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _chunks(rows: Iterator[ParsedRow], size: int) -> Iterator[list[ParsedRow]]:
    chunk: list[ParsedRow] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return f"{names.get(type(value), 'a number')}: {_shown(value)}"


def _shown(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text if len(text) <= 80 else text[:77] + "…"
