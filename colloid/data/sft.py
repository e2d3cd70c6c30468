"""Conversations from data files, for supervised fine-tuning: read, rendered, masked, filtered by length."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from colloid.config.prompt_files import PromptFile
from colloid.data.conversations import Conversation, conversation
from colloid.data.files import RawRow
from colloid.data.prompts import PromptFormat, parse_row
from colloid.data.reading import LoadOptions, load
from colloid.data.rows import BadRow, Messages, Outcome, PromptDataset, PromptRow, TooLong, Usable
from colloid.errors import DataError

logger = logging.getLogger(__name__)


def load_conversations(
    files: str | Path | Sequence[str | PromptFile],
    tokenizer: Any,
    row_format: PromptFormat,
    end_ids: Sequence[int] = (),
    options: LoadOptions = LoadOptions(),  # noqa: B008
) -> PromptDataset:
    """Reads files whose rows hold conversations; each is rendered and masked, as a check.

    The token ids of a row are those before the first trained token.

    Args:
        row_format: `max_tokens` is for the whole conversation.
        end_ids: see `conversation`.

    Raises:
        DataError: a file is missing or a row cannot be used (with its line), or no row is left.
    """
    dataset, tally = load(files, ConversationProcessor(tokenizer, row_format, end_ids), options)
    if tally.num_long:
        logger.warning(
            "%s: %d of %d conversations are longer than %d tokens and are left out (the longest has %d); the limit is "
            "the context length, see --rollout-max-context-len",
            *(dataset.path, tally.num_long, tally.num_rows, row_format.max_tokens, tally.longest),
        )
    if tally.num_rewritten:
        logger.warning(
            "%s: in %d of %d conversations the chat template shows turns of the assistant's otherwise than they are "
            "generated (it drops <think> blocks of earlier ones, say). They are trained as the whole conversation "
            "shows them; to train each as it was said, give conversations that end with it, or turn the "
            "earlier ones off with step_loss_mask 0",
            *(dataset.path, tally.num_rewritten, tally.num_rows),
        )
    return dataset


class ConversationProcessor:
    """Rows as conversations: checked, rendered, masked."""

    noun = "conversations"
    limit_hint = "The limit is the context length, see --rollout-max-context-len"

    def __init__(self, tokenizer: Any, row_format: PromptFormat, end_ids: Sequence[int] = ()):
        self._tokenizer, self._format, self._end_ids = tokenizer, row_format, list(end_ids)
        self.max_tokens = row_format.max_tokens
        self.columns = row_format.columns

    def __call__(self, rows: list[RawRow]) -> list[Outcome]:
        """One outcome a row."""
        return [self._outcome(raw) for raw in rows]

    def _outcome(self, raw: RawRow) -> Outcome:
        where = ""
        try:
            row = parse_row(raw, self._format)
            where = f"{row.where}: "
            found = tokenised(row.prompt, self._tokenizer, self._format, row.metadata.get("tools"), self._end_ids)
        except DataError as error:
            return BadRow(f"{where}{error}")
        if self.max_tokens is not None and len(found.token_ids) > self.max_tokens:
            return TooLong(len(found.token_ids), found.rewritten)
        digest = xxhash.xxh3_128_digest(orjson.dumps([row.prompt, row.metadata.get("tools")], default=str))
        ids = np.asarray(found.token_ids[: found.prompt_length], dtype=np.int32)
        kept = PromptRow(row.prompt, ids, row.label, row.metadata, row.number, row.path)
        return Usable(kept, digest, found.rewritten)


def tokenised(
    messages: str | Messages,
    tokenizer: Any,
    row_format: PromptFormat,
    tools: list | None,
    end_ids: Sequence[int],
) -> Conversation:
    """`conversation` as the options want it.

    Raises:
        DataError: see there; or it is a text, or nothing stands before what is trained.
    """
    if isinstance(messages, str):
        raise DataError(
            f"{row_format.input_key!r} is a text, and SFT needs a list of messages, the assistant's among them. Name "
            "their key with --input-key"
        )
    kwargs = row_format.chat_template_kwargs
    found = conversation(messages, tokenizer, tools=tools, end_ids=end_ids, **kwargs)
    if not found.prompt_length:
        raise DataError("nothing stands before the assistant's text, so nothing can predict its first token")
    return found


def end_token_ids(directory: str, hf_config: dict[str, Any] | None = None) -> list[int]:
    """Tokens that end generation, as the model's directory says."""
    found: list[int] = []
    path = Path(directory, "generation_config.json")
    generation = json.loads(path.read_text()) if path.is_file() else {}
    for source in (generation, hf_config or {}):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if value is not None else []
    return sorted(set(found))
