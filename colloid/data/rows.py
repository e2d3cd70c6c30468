"""What a row of a data file became: a prompt that can be used, or the reason why not."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from colloid.data.files import Columns, RawRow, place
from colloid.errors import DataError

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


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
    """The line, from 1, of a JSONL file; the row, from 0, of others."""
    path: str = ""

    @property
    def where(self) -> str:
        """How errors name the row."""
        return place(self.path, self.line)


@dataclass(frozen=True)
class PromptDataset:
    """The prompts of one or several files, in their order, all in memory."""

    path: str
    rows: list[PromptRow]
    num_filtered: int
    fingerprint: str
    """Changes when a prompt or label changes."""
    num_bad: int = 0
    """Rows that `--skip-bad-rows` left out."""
    drawn: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    """How many rows `sample` has given, its one entry; a data source saves it."""

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, count: int) -> list[PromptRow]:
        """`count` rows at random: the next ones of an endless pass, each time round in another order.

        For data sources of users; every row comes once before any comes twice.
        """
        size = len(self.rows)
        places = range(self.drawn[0], self.drawn[0] + count)
        self.drawn[0] += count
        orders = {turn: np.random.default_rng(turn).permutation(size) for turn in {place // size for place in places}}
        return [self.rows[orders[place // size][place % size]] for place in places]

    def head(self) -> list[PromptRow]:
        """The rows that can be looked at before the run: all."""
        return self.rows

    def has_labels(self) -> bool:
        return any(row.label is not None for row in self.rows)

    def metrics(self) -> dict[str, float]:
        """What was left out, where anything was."""
        return {"data/num_bad_rows": float(self.num_bad)} if self.num_bad else {}


class Usable(NamedTuple):
    """A row as a prompt."""

    row: PromptRow
    digest: bytes
    """Changes with the row's content."""
    rewritten: bool = False
    """A conversation that the chat template shows otherwise than it was generated."""


class TooLong(NamedTuple):
    """More tokens than the limit."""

    length: int
    rewritten: bool = False


class BadRow(NamedTuple):
    """Cannot be used; the message names file and line."""

    message: str


Outcome = Usable | TooLong | BadRow


class Processor(Protocol):
    """Makes rows into prompts. Can be pickled: worker processes run it too."""

    noun: str
    """What a row is, in messages: `prompts`."""
    limit_hint: str
    """Which options the limit follows from."""
    max_tokens: int | None
    columns: Columns

    def __call__(self, rows: list[RawRow]) -> list[Outcome]: ...


@dataclass
class Tally:
    """Counts what became of rows, and says once what is worth knowing."""

    name: str
    """The file or files."""
    skip_bad_rows: bool = False
    num_rows: int = 0
    num_usable: int = 0
    num_long: int = 0
    num_bad: int = 0
    num_rewritten: int = 0
    longest: int = 0
    first_bad: str = field(default="", repr=False)

    def add(self, outcome: Outcome) -> Usable | None:
        """Counts it, and returns it where it is usable.

        Raises:
            DataError: the row is bad, and bad rows are not to be skipped.
        """
        self.num_rows += 1
        if isinstance(outcome, Usable):
            self.num_usable += 1
            self.num_rewritten += outcome.rewritten
            self.longest = max(self.longest, len(outcome.row.token_ids))
            return outcome
        if isinstance(outcome, TooLong):
            self.num_long += 1
            self.num_rewritten += outcome.rewritten
            self.longest = max(self.longest, outcome.length)
            return None
        if not self.skip_bad_rows:
            raise DataError(outcome.message)
        if not self.num_bad:
            self.first_bad = outcome.message
            logger.warning("--skip-bad-rows: the first row that is left out: %s", outcome.message)
        self.num_bad += 1
        return None

    def say_bad(self) -> None:
        """Logs how many rows were bad, where any was."""
        if self.num_bad:
            logger.warning("%s: %d of %d rows are bad and are left out", self.name, self.num_bad, self.num_rows)

    def check_any_left(self, processor: Processor) -> None:
        """Raises `DataError` where no row is left."""
        if self.num_usable:
            return
        if not self.num_rows:
            raise DataError(
                f"{self.name}: the file has no rows. It needs one object a line (or row), like "
                '{"prompt": "What is 7 + 8?", "label": "15"}'
            )
        if self.num_bad:
            raise DataError(
                f"{self.name}: no row of {self.num_rows} is left: {self.num_bad} are bad and {self.num_long} too long. "
                f"The first bad one: {self.first_bad}"
            )
        raise DataError(
            f"{self.name}: all {self.num_rows} {processor.noun} are longer than {processor.max_tokens} tokens, none "
            f"is left. {processor.limit_hint}"
        )
