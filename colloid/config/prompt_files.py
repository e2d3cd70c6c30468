"""Names of prompt files: `path` or `path@[start:stop]`, rows as Python slices count them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from colloid.errors import ConfigError

FORMATS = "JSONL (one object a line), Parquet (.parquet), or a directory that Hugging Face datasets saved"
_OTHER_FORMATS = (".csv", ".tsv", ".arrow", ".gz", ".zst", ".zip", ".xlsx", ".pkl")
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")


@dataclass(frozen=True)
class PromptFile:
    """A file, or a part of its rows."""

    path: str
    start: int | None = None
    stop: int | None = None
    """As in a Python slice: negative ones count from the end, None is open."""

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return self.path
        return f"{self.path}@[{_text(self.start)}:{_text(self.stop)}]"

    @property
    def kind(self) -> str:
        """`parquet`, `datasets` or `jsonl`."""
        if os.path.isdir(self.path):
            return "datasets"
        return "parquet" if self.path.lower().endswith((".parquet", ".pq")) else "jsonl"


def parse_prompt_file(text: str, option: str = "--prompt-data") -> PromptFile:
    """`path@[start:stop]` taken apart.

    Raises:
        ConfigError: what stands in the brackets is no slice.
    """
    path, at, rest = text.rpartition("@[")
    if not at or not rest.endswith("]"):
        return PromptFile(text)
    match = _SLICE.fullmatch(rest[:-1].replace(" ", ""))
    if not path or match is None:
        raise ConfigError(
            f"{option} {text}: [{rest} is no slice of rows; write [a:b], [a:], [:b] or [-a:], say FILE@[0:100]"
        )
    start, stop = (None if number is None else int(number) for number in match.groups())
    return PromptFile(path, start, stop)


def parse_prompt_files(texts: str | Iterable[str], option: str = "--prompt-data") -> list[PromptFile]:
    """One or several names."""
    return [parse_prompt_file(text, option) for text in ([texts] if isinstance(texts, str) else texts)]


def unreadable(file: PromptFile, option: str) -> str | None:
    """Why there is nothing to read under this name; None: there is."""
    path = file.path
    if not os.path.exists(path):
        return f"{option} {path}: there is no such file (looked for {os.path.abspath(path)})"
    if os.path.isdir(path) and not any(
        os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")
    ):
        return f"{option} {path} is a directory without a state.json or dataset_dict.json; give {FORMATS}"
    if not os.path.isdir(path) and path.lower().endswith(_OTHER_FORMATS):
        return f"{option} {path}: this format cannot be read; give {FORMATS}"
    return None


def _text(number: int | None) -> str:
    return "" if number is None else str(number)
