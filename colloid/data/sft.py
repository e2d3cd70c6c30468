"""Conversations from JSONL files, for supervised fine-tuning: read, rendered, masked, filtered by length."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from colloid.data.conversations import Conversation, conversation
from colloid.data.prompts import Messages, PromptDataset, PromptFormat, PromptRow, parsed_rows
from colloid.errors import DataError

logger = logging.getLogger(__name__)


def load_conversations(
    path: str | Path, tokenizer: Any, row_format: PromptFormat, end_ids: Sequence[int] = ()
) -> PromptDataset:
    """Reads a JSONL file whose rows hold conversations; each is rendered and masked, as a check.

    The token ids of a row are those before the first trained token.

    Args:
        row_format: `max_tokens` is for the whole conversation.
        end_ids: see `conversation`.

    Raises:
        DataError: the file is missing or a row cannot be used (with its line), or no row is left.
    """
    rows: list[PromptRow] = []
    num_rows, num_long, num_rewritten, longest = 0, 0, 0, 0
    digest = xxhash.xxh3_128()
    for row in parsed_rows(Path(path), row_format):
        num_rows += 1
        where = f"{path}:{row.line}"
        try:
            found = tokenised(row.prompt, tokenizer, row_format, row.metadata.get("tools"), end_ids)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        num_rewritten += found.rewritten
        longest = max(longest, len(found.token_ids))
        if row_format.max_tokens is not None and len(found.token_ids) > row_format.max_tokens:
            num_long += 1
            continue
        digest.update(orjson.dumps([row.prompt, row.metadata.get("tools")], default=str))
        ids = np.asarray(found.token_ids[: found.prompt_length], dtype=np.int32)
        rows.append(PromptRow(row.prompt, ids, row.label, row.metadata, row.line))
    if not num_rows:
        raise DataError(f"{path}: the file has no rows. It needs one JSON object a line, with a list of messages")
    if num_long:
        logger.warning(
            "%s: %d of %d conversations are longer than %d tokens and are left out (the longest has %d); the limit is "
            "the context length, see --rollout-max-context-len",
            *(path, num_long, num_rows, row_format.max_tokens, longest),
        )
    if num_rewritten:
        logger.warning(
            "%s: in %d of %d conversations the chat template shows turns of the assistant's otherwise than they are "
            "generated (it drops <think> blocks of earlier ones, say). They are trained as the whole conversation "
            "shows them; to train each as it was said, give conversations that end with it, or turn the "
            "earlier ones off with step_loss_mask 0",
            *(path, num_rewritten, num_rows),
        )
    if not rows:
        raise DataError(f"{path}: all {num_rows} conversations are longer than {row_format.max_tokens} tokens")
    return PromptDataset(str(path), rows, num_long, digest.hexdigest())


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
