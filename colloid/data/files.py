"""Rows of JSONL files, Parquet files and Hugging Face `datasets` directories, one after the other, from any row on.

A reader holds a piece of its file at a time: its memory does not grow with the file. `position` is plain data, and a
new reader that is given it goes on with exactly the next row.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from colloid.config.prompt_files import PromptFile, unreadable
from colloid.errors import DataError

BATCH_ROWS = 256
READ_BUFFER = 2**20
Position = dict[str, int]


class RawRow(NamedTuple):
    """A row that nothing has looked into yet."""

    path: str
    number: int
    """The line, from 1, of a JSONL file; the row, from 0, of others."""
    data: bytes | dict[str, Any]
    """A line, or the columns."""


class Columns(NamedTuple):
    """Columns to read; the others of a columnar file stay on disk."""

    required: tuple[tuple[str, str], ...]
    """(column, option that names it)."""
    optional: tuple[str, ...] = ()


def place(path: str, number: int) -> str:
    """How errors name a row."""
    return f"{path}:{number}" if PromptFile(path).kind == "jsonl" else f"{path}: row {number}"


def open_rows(file: PromptFile, columns: Columns, position: Position | None = None) -> RowReader:
    """A reader at the first row of the file's slice, or at the position of an earlier reader of the same file.

    Raises:
        DataError: the file is missing, of another format, damaged, or lacks a column.
    """
    text = unreadable(file, "--prompt-data")
    if text:
        raise DataError(text)
    return {"jsonl": JsonLines, "parquet": Parquet, "datasets": SavedDataset}[file.kind](file, columns, position)


class RowReader(Iterator[RawRow], ABC):
    """The rows of one slice, in order."""

    def __init__(self, file: PromptFile, columns: Columns, position: Position | None = None):
        self.path, self._columns = file.path, columns
        start, self._stop = file.start or 0, file.stop
        if start < 0 or (self._stop or 0) < 0:
            start, self._stop, _ = slice(file.start, file.stop).indices(self.num_rows())
        self._row = 0
        self._seek({"row": start} if position is None else position)

    def __next__(self) -> RawRow:
        if self._stop is not None and self._row >= self._stop:
            raise StopIteration
        return self._read()

    @property
    def position(self) -> Position:
        """Of the next row; `row` counts the file's rows from 0."""
        return {"row": self._row}

    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the whole file."""

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""

    @abstractmethod
    def _seek(self, position: Position) -> None:
        """The next row is the one at `position`."""

    @abstractmethod
    def _read(self) -> RawRow:
        """The next row of the file. Raises StopIteration at its end."""


class JsonLines(RowReader):
    """Empty lines are no rows."""

    def num_rows(self) -> int:
        with open(self.path, "rb", buffering=READ_BUFFER) as file:
            return sum(1 for line in file if not line.isspace())

    @property
    def position(self) -> Position:
        return {"row": self._row, "line": self._line, "byte": self._byte}

    def close(self) -> None:
        self._file.close()

    def _seek(self, position: Position) -> None:
        self._file = open(self.path, "rb", buffering=READ_BUFFER)  # noqa: SIM115
        self._line = self._byte = 0
        if "byte" in position:
            self._row, self._line, self._byte = position["row"], position["line"], position["byte"]
            self._file.seek(self._byte)
        while self._row < position["row"]:
            try:
                self._read()
            except StopIteration:
                return

    def _read(self) -> RawRow:
        for line in self._file:
            self._line += 1
            self._byte += len(line)
            if not line.isspace():
                self._row += 1
                return RawRow(self.path, self._line, line)
        raise StopIteration


class _Columnar(RowReader):
    """Files of Arrow's: record batches, of which one at a time is in memory."""

    def close(self) -> None:
        self._batches.close()

    def _seek(self, position: Position) -> None:
        names = self._check_columns(self._names())
        self._row = position["row"]
        self._batches = self._record_batches(self._row, names)
        self._waiting: Iterator[dict[str, Any]] = iter(())

    def _read(self) -> RawRow:
        import pyarrow

        while (row := next(self._waiting, None)) is None:
            try:
                batch = next(self._batches)
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(f"{place(self.path, self._row)}: the file cannot be read: {error}") from error
            self._waiting = iter(batch.to_pylist())
        self._row += 1
        return RawRow(self.path, self._row - 1, row)

    def _check_columns(self, names: list[str]) -> list[str]:
        for name, option in self._columns.required:
            if name not in names:
                raise DataError(
                    f"{self.path}: no column {name!r}; there are {', '.join(map(repr, names))}. Name it with {option}"
                )
        wanted = {name for name, _ in self._columns.required} | set(self._columns.optional)
        return [name for name in names if name in wanted]

    @abstractmethod
    def _names(self) -> list[str]:
        """The file's columns."""

    @abstractmethod
    def _record_batches(self, start: int, names: list[str]) -> Iterator[Any]:
        """`pyarrow.RecordBatch`es of small size, from row `start` on."""


class Parquet(_Columnar):
    """Row groups are skipped by their metadata, and read page by page."""

    def __init__(self, file: PromptFile, columns: Columns, position: Position | None = None):
        import pyarrow
        import pyarrow.parquet

        try:
            self._file = pyarrow.parquet.ParquetFile(file.path, buffer_size=READ_BUFFER, pre_buffer=False)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file.path} is no Parquet file that can be read: {error}") from error
        super().__init__(file, columns, position)

    def num_rows(self) -> int:
        return self._file.metadata.num_rows

    def close(self) -> None:
        super().close()
        self._file.close()

    def _names(self) -> list[str]:
        return self._file.schema_arrow.names

    def _record_batches(self, start: int, names: list[str]) -> Iterator[Any]:
        metadata, group = self._file.metadata, 0
        while group < metadata.num_row_groups and start >= metadata.row_group(group).num_rows:
            start -= metadata.row_group(group).num_rows
            group += 1
        groups = range(group, metadata.num_row_groups)
        if not groups:
            return
        for batch in self._file.iter_batches(BATCH_ROWS, row_groups=groups, columns=names, use_threads=False):
            yield batch.slice(start)
            start = max(0, start - batch.num_rows)


class SavedDataset(_Columnar):
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` (its split `train`) writes: Arrow streams."""

    def __init__(self, file: PromptFile, columns: Columns, position: Position | None = None):
        directory = Path(file.path)
        if (directory / "dataset_dict.json").is_file():
            splits = json.loads((directory / "dataset_dict.json").read_text())["splits"]
            if "train" not in splits:
                paths = ", ".join(str(directory / split) for split in splits)
                raise DataError(f"{directory} has no split 'train'; name one of its splits: {paths}")
            directory /= "train"
        state = json.loads((directory / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise DataError(f"{directory} was saved with an index over its rows: save it anew, after flatten_indices()")
        self._files = [directory / entry["filename"] for entry in state["_data_files"]]
        if not self._files:
            raise DataError(f"{directory} has no data files")
        super().__init__(file, columns, position)

    def num_rows(self) -> int:
        return sum(batch.num_rows for path in self._files for batch in _arrow_batches(path))

    def _names(self) -> list[str]:
        import pyarrow

        with pyarrow.memory_map(str(self._files[0])) as source, pyarrow.ipc.open_stream(source) as stream:
            return stream.schema.names

    def _record_batches(self, start: int, names: list[str]) -> Iterator[Any]:
        for path in self._files:
            for batch in _arrow_batches(path):
                for first in range(min(start, batch.num_rows), batch.num_rows, BATCH_ROWS):
                    yield batch.select(names).slice(first, BATCH_ROWS)
                start = max(0, start - batch.num_rows)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Batches of an Arrow stream (what `datasets` writes), or of an Arrow file."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            with pyarrow.ipc.open_file(source) as file:
                for number in range(file.num_record_batches):
                    yield file.get_batch(number)
            return
        source.seek(0)
        with pyarrow.ipc.open_stream(source) as stream:
            yield from stream
