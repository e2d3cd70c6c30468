"""Text in and out of the engine: the tokenizer (loaded when first needed), stop strings, end-of-sequence ids."""

import os
import threading
from pathlib import Path
from typing import Any

from colloid.engines.contract_fields import BadRequest
from colloid.engines.embedded.request import FinishReason, Sequence

# Tokens can decode to nothing, or to part of a character: this many more than a stop string's bytes are looked at.
STOP_MARGIN = 8
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Text:
    """`eos_token_ids` from the model's config, until the tokenizer is loaded, which adds its own.

    A model directory without a tokenizer (or `skip`) is served by token ids alone: answers carry an empty text.
    """

    def __init__(self, model_path: str | Path, eos_token_ids: tuple[int, ...], skip: bool = False):
        self.model_path = Path(model_path)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.available = not skip and any((self.model_path / name).is_file() for name in TOKENIZER_FILES)
        self._tokenizer: Any = None
        self._longest_token: int | None = None
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Any:
        """Raises BadRequest where there is none."""
        if not self.available:
            raise BadRequest(
                f"{self.model_path} has no tokenizer (or --skip-tokenizer-init was given): send input_ids, no text and "
                f"no stop strings"
            )
        with self._lock:
            if self._tokenizer is None:
                os.environ.setdefault("HF_HUB_OFFLINE", "1")
                from transformers import AutoTokenizer  # takes seconds to import

                self._tokenizer = AutoTokenizer.from_pretrained(self.model_path, local_files_only=True)
                if self._tokenizer.eos_token_id is not None:
                    self.eos_token_ids |= {self._tokenizer.eos_token_id}
        return self._tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        ids = tuple(self.tokenizer(text)["input_ids"])
        if not ids:
            raise BadRequest("the text has no tokens")
        return ids

    def check_length(self, text: str, context_length: int) -> None:
        """Refuses what is longer than any tokens of a context, before it is tokenised.

        Raises:
            BadRequest: with both lengths.
        """
        if self._longest_token is None:
            self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        most = context_length * self._longest_token
        if len(text) > most:
            raise BadRequest(
                f"the text has {len(text)} characters; the model's context of {context_length} tokens never holds more "
                f"than {most}"
            )

    def token_text(self, token: int) -> str:
        """One token by itself."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], variables: dict[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a conversation; a final assistant message is continued, anything else is answered.

        Args:
            variables: further ones of the template, such as `enable_thinking`.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise BadRequest("the model's tokenizer has no chat template: use /generate or /v1/completions")
        continues = messages[-1].get("role") == "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **(variables or {}),
            )
        except Exception as error:  # a template is a program of the model's author; it raises what it likes
            raise BadRequest(f"the chat template does not take these messages: {error}") from error
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, sequence: Sequence, length: int, reason: FinishReason | None) -> str:
        """The text of a sample's first `length` output tokens; what stopped it is cut off, unless asked.

        Args:
            reason: why it ended with them; None: it did not. (The sample itself may be further by now.)
        """
        if not self.available:
            return ""
        ids, params = sequence.output_ids[:length], sequence.params
        trims = reason is not None and reason.type == "stop" and not params.no_stop_trim
        if trims and isinstance(reason.matched, int):
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        if trims and isinstance(reason.matched, str) and reason.matched in text:
            text = text[: text.index(reason.matched)]
        return text

    def find_stop(self, output_ids: list[int], stops: tuple[str, ...]) -> str | None:
        """The stop string that the last token completed, if any."""
        window = max(len(stop.encode()) for stop in stops) + STOP_MARGIN
        tail = self.tokenizer.decode(output_ids[-window:], skip_special_tokens=False)
        return next((stop for stop in stops if stop in tail), None)
