"""Prompts that are read as they are needed: constant memory for files of any size.

    file ──► window of rows ──► shuffled ──► chunks ──► processed (workers) ──► next_row
             (`window` rows)                (read ahead)

Invariants:
1. An epoch hands out every usable row of every file once; window w of epoch e is shuffled by (seed, e, w) alone.
2. `state` is where the window of the row handed out last begins, and how many of the window's rows are behind it. So a
   resume reads one window anew, and goes on with exactly the next row, whatever was read ahead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from colloid.config.prompt_files import PromptFile
from colloid.data.files import Position, RawRow, open_rows
from colloid.data.reading import CHUNK_ROWS, Inline, in_order
from colloid.data.rows import Outcome, Processor, PromptRow, Tally
from colloid.data.workers import DataWorkers

FINGERPRINT_BYTES = 2**16


@dataclass(frozen=True)
class _Begin:
    """Where a window begins."""

    epoch: int = 0
    window: int = 0
    file: int = 0
    position: Position | None = None


@dataclass(frozen=True)
class _Chunk:
    rows: list[RawRow]
    begin: _Begin
    first: int
    """Rows of the window before this chunk, in the shuffled order."""


class PromptStream:
    """An endless sequence of prompts, epoch after epoch.

    Args:
        files: read one after the other.
        processor: what makes rows into prompts.
        pool: where it runs; shared with other streams perhaps, and closed by whoever made it.
        seed, shuffle: whether windows are shuffled, and by what.
        window: rows that are shuffled together.
        skip_bad_rows: count them, rather than raise.
    """

    def __init__(
        self,
        files: list[PromptFile],
        processor: Processor,
        pool: DataWorkers | Inline,
        *,
        seed: int,
        shuffle: bool,
        window: int,
        skip_bad_rows: bool = False,
    ):
        self.path = ", ".join(map(str, files))
        self._files, self._processor, self._pool = files, processor, pool
        self._seed, self._shuffle, self._window = seed, shuffle, window
        self._tally = Tally(self.path, skip_bad_rows)
        self._length: int | None = None
        self._head: list[PromptRow] | None = None
        self.fingerprint = self._fingerprint()
        self._begin_at(_Begin(), 0, 0)

    def __len__(self) -> int:
        """Rows of one epoch, bad and too long ones too. Counted when first asked for: that reads all JSONL files."""
        if self._length is None:
            self._length = sum(self._count(file) for file in self._files)
        return self._length

    @property
    def epoch(self) -> int:
        """Of the row handed out last."""
        return self._chunk.begin.epoch

    def head(self) -> list[PromptRow]:
        """The usable ones of each file's first rows: what is wrong with columns and keys shows before the run starts.

        Raises:
            DataError: one of the rows is bad.
        """
        if self._head is not None:
            return self._head
        tally = Tally(self.path, self._tally.skip_bad_rows)
        rows = []
        for file in self._files:
            reader = open_rows(file, self._processor.columns)
            outcomes = self._processor(list(islice(reader, CHUNK_ROWS)))
            reader.close()
            rows += [usable.row for outcome in outcomes if (usable := tally.add(outcome)) is not None]
        if not tally.num_rows:
            tally.check_any_left(self._processor)
        self._head = rows
        return rows

    def next_row(self) -> PromptRow:
        """The next prompt.

        Raises:
            DataError: a row cannot be used, or a whole epoch has none that can.
        """
        while True:
            while self._index < len(self._outcomes):
                outcome = self._outcomes[self._index]
                self._index += 1
                if (usable := self._tally.add(outcome)) is not None:
                    self._usable += 1
                    return usable.row
            chunk, self._outcomes = next(self._chunks)
            if chunk.begin.epoch != self._chunk.begin.epoch:
                if not self._usable:
                    self._tally.check_any_left(self._processor)
                    raise AssertionError("an epoch without prompts")
                self._usable = 0
            self._chunk, self._index = chunk, 0

    def sample(self, count: int) -> list[PromptRow]:
        """The next `count` prompts: what a data source of one's own calls, however the data is read."""
        return [self.next_row() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Plain data: where to go on."""
        begin = self._chunk.begin
        return {
            "fingerprint": self.fingerprint,
            "epoch": begin.epoch,
            "window": begin.window,
            "file": begin.file,
            "position": begin.position,
            "taken": self._chunk.first + self._index,
            "usable": self._usable,
            "num_bad": self._tally.num_bad,
            "num_long": self._tally.num_long,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. In changed data it goes on at the same row number."""
        position, file = state["position"], min(state["file"], len(self._files) - 1)
        if position is not None and state["fingerprint"] != self.fingerprint:
            position = {"row": position["row"]}
        self._tally.num_bad, self._tally.num_long = state["num_bad"], state["num_long"]
        begin = _Begin(state["epoch"], state["window"], file, position)
        self._begin_at(begin, state["taken"], state["usable"])

    def metrics(self) -> dict[str, float]:
        """Rows that were left out since the run began, and the epoch."""
        return {
            "data/num_bad_rows": float(self._tally.num_bad),
            "data/num_long_rows": float(self._tally.num_long),
            "data/epoch": float(self.epoch),
        }

    def close(self) -> None:
        """Ends the pool."""
        self._pool.close()

    def _begin_at(self, begin: _Begin, taken: int, usable: int) -> None:
        self._chunk, self._outcomes, self._index = _Chunk([], begin, taken), [], 0
        self._usable = usable
        self._chunks: Iterator[tuple[_Chunk, list[Outcome]]] = in_order(self._all_chunks(begin, taken), self._pool)

    def _all_chunks(self, begin: _Begin, taken: int) -> Iterator[_Chunk]:
        while True:
            anything = begin.window > 0
            for window_begin, rows in self._windows(begin):
                anything = True
                order = self._order(window_begin, len(rows))
                for first in range(taken, len(rows), CHUNK_ROWS):
                    yield _Chunk([rows[i] for i in order[first : first + CHUNK_ROWS]], window_begin, first)
                taken = 0
            if not anything:
                Tally(self.path).check_any_left(self._processor)
            begin, taken = _Begin(begin.epoch + 1), 0

    def _order(self, begin: _Begin, size: int) -> list[int]:
        if not self._shuffle:
            return list(range(size))
        return np.random.default_rng([self._seed, begin.epoch, begin.window]).permutation(size).tolist()

    def _windows(self, begin: _Begin) -> Iterator[tuple[_Begin, list[RawRow]]]:
        """The windows of the rest of an epoch; one may go over the end of a file."""
        rows: list[RawRow] = []
        for number in range(begin.file, len(self._files)):
            position = begin.position if number == begin.file else None
            reader = open_rows(self._files[number], self._processor.columns, position)
            if not rows:
                begin = _Begin(begin.epoch, begin.window, number, reader.position)
            while more := list(islice(reader, self._window - len(rows))):
                rows += more
                if len(rows) == self._window:
                    yield begin, rows
                    rows = []
                    begin = _Begin(begin.epoch, begin.window + 1, number, reader.position)
            reader.close()
        if rows:
            yield begin, rows

    def _count(self, file: PromptFile) -> int:
        reader = open_rows(file, self._processor.columns)
        length = len(range(reader.num_rows())[file.start : file.stop])
        reader.close()
        return length

    def _fingerprint(self) -> str:
        """Changes with the options of the stream, and with its files' sizes, beginnings and ends."""
        digest = xxhash.xxh3_128(repr([self._seed, self._shuffle, self._window]).encode())
        for file in self._files:
            digest.update(str(file).encode())
            open_rows(file, self._processor.columns).close()  # is it there, and has it the columns?
            if file.kind == "datasets":
                for path in sorted(Path(file.path).rglob("*.json")):
                    digest.update(path.read_bytes())
                continue
            size = os.path.getsize(file.path)
            digest.update(str(size).encode())
            with open(file.path, "rb") as opened:
                digest.update(opened.read(FINGERPRINT_BYTES))
                opened.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(opened.read())
        return digest.hexdigest()
