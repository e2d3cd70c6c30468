"""Rows through a processor, in order, here or in worker processes; and whole files into memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from colloid.config.prompt_files import PromptFile, parse_prompt_file
from colloid.data.files import Columns, RawRow, open_rows
from colloid.data.rows import Outcome, Processor, PromptDataset, PromptRow, Tally
from colloid.data.workers import DataWorkers, span

logger = logging.getLogger(__name__)

CHUNK_ROWS = 256
PATIENCE = 60
"""Seconds without an answer of the data workers after which a warning is logged, and again."""


@dataclass(frozen=True)
class LoadOptions:
    """How files are read."""

    skip_bad_rows: bool = False
    num_workers: int = 0
    """Processes that look into rows and tokenise; 0: this one does."""


class Inline:
    """What `DataWorkers` is, in this process."""

    depth = 0

    def __init__(self, processor: Processor):
        self._processor = processor

    def submit(self, rows: list[RawRow]) -> Future:
        """The outcomes of rows, done at once."""
        future: Future = Future()
        future.set_result(self._processor(rows))
        return future

    def close(self) -> None:
        """Nothing is open."""


def make_pool(processor: Processor, num_workers: int) -> DataWorkers | Inline:
    """Where rows are processed."""
    return DataWorkers(processor, num_workers) if num_workers else Inline(processor)


def in_order(chunks: Iterable[Any], pool: DataWorkers | Inline) -> Iterator[tuple[Any, list[Outcome]]]:
    """Each chunk (with its `rows`) and their outcomes; at most `pool.depth` chunks are ahead of the one handed out."""
    pending: deque[tuple[Any, Future]] = deque()
    for chunk in chunks:
        pending.append((chunk, pool.submit(chunk.rows)))
        if len(pending) > pool.depth:
            yield _done(*pending.popleft())
    while pending:
        yield _done(*pending.popleft())


def _done(chunk: Any, future: Future) -> tuple[Any, list[Outcome]]:
    """Waits for the outcomes, and says what for where it is long: a tokenizer may hang."""
    waited = 0
    while True:
        try:
            return chunk, future.result(PATIENCE)
        except TimeoutError:
            if future.done():
                raise
            waited += PATIENCE
            logger.warning("the data workers have not tokenised %s after %g s", span(chunk.rows), waited)


@dataclass(frozen=True)
class Chunk:
    """Rows that are processed together."""

    rows: list[RawRow]


def named(files: str | Path | Sequence[str | PromptFile]) -> list[PromptFile]:
    """File names as they were given, taken apart."""
    given = [files] if isinstance(files, (str, Path)) else files
    return [file if isinstance(file, PromptFile) else parse_prompt_file(str(file)) for file in given]


def all_chunks(files: Iterable[PromptFile], columns: Columns) -> Iterator[Chunk]:
    """The rows of all files, in order."""
    for file in files:
        reader = open_rows(file, columns)
        while rows := list(islice(reader, CHUNK_ROWS)):
            yield Chunk(rows)
        reader.close()


def load(
    files: str | Path | Sequence[str | PromptFile], processor: Processor, options: LoadOptions
) -> tuple[PromptDataset, Tally]:
    """All usable rows of the files.

    Raises:
        DataError: a file is missing or a row cannot be used, or no row is left.
    """
    found = named(files)
    name = ", ".join(map(str, found))
    tally = Tally(name, options.skip_bad_rows)
    rows: list[PromptRow] = []
    digest = xxhash.xxh3_128()
    pool = make_pool(processor, options.num_workers)
    try:
        for _, outcomes in in_order(all_chunks(found, processor.columns), pool):
            for outcome in outcomes:
                if (usable := tally.add(outcome)) is not None:
                    rows.append(usable.row)
                    digest.update(usable.digest)
    finally:
        pool.close()
    tally.check_any_left(processor)
    tally.say_bad()
    return PromptDataset(name, rows, tally.num_long, digest.hexdigest(), tally.num_bad), tally
