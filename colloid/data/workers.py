"""Worker processes that look into rows and tokenise them. Plain pipes: one chunk of rows at a time in each worker.

    submit ──► bounded queue ──► thread of a worker ──► its process ──► Future
                                     └ the process dies ──► a new one, once; then `DataError`

The order is the caller's: it waits for the futures in the order in which it submitted. A worker ends with its parent
(at the end of its stdin), and `close` kills it, whatever it does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from colloid.data.files import RawRow, place
from colloid.data.rows import Outcome, Processor
from colloid.errors import DataError

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<Q")
CLOSED = "the data workers were closed"
END_TIMEOUT = 10
"""Seconds that a killed worker is waited for."""
CHUNKS_A_WORKER = 2
"""Chunks of rows that are in the pool at a time, for each worker."""


class DataWorkers:
    """A pool of `num_workers` processes that run `processor`.

    Args:
        processor: pickled once, and sent to each worker at its start.
    """

    def __init__(self, processor: Processor, num_workers: int):
        self._setup = pickle.dumps(processor)
        self._closed = False
        self._tasks: queue.Queue[tuple[list[RawRow], Future] | None] = queue.Queue()
        self._processes: dict[int, subprocess.Popen] = {}
        self.depth = CHUNKS_A_WORKER * num_workers
        """Chunks that a caller should have submitted ahead of the one it waits for."""
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), daemon=True, name=f"data-worker-{number}")
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, rows: list[RawRow]) -> Future[list[Outcome]]:
        """The outcomes of rows, in their order."""
        future: Future = Future()
        if self._closed:
            raise RuntimeError(CLOSED)
        self._tasks.put((rows, future))
        return future

    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [process.pid for process in list(self._processes.values()) if process.poll() is None]

    def close(self) -> None:
        """Kills the workers; what is in work has no result."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        for process in list(self._processes.values()):
            process.kill()
        for thread in self._threads:
            thread.join(END_TIMEOUT)

    def _serve(self, number: int) -> None:
        while (task := self._tasks.get()) is not None:
            rows, future = task
            try:
                future.set_result(self._answer(number, rows))
            except Exception as error:  # Belongs to the one who waits.
                future.set_exception(error)
        self._end(number)

    def _answer(self, number: int, rows: list[RawRow]) -> list[Outcome]:
        body = pickle.dumps(rows)
        for attempt in (1, 2):
            if self._closed:
                raise DataError(CLOSED)
            process = self._processes.get(number) or self._start(number)
            try:
                write_frame(process.stdin, body)
                answer = read_frame(process.stdout)
            except (OSError, EOFError):
                self._end(number)
                if self._closed:
                    raise DataError(CLOSED) from None
                message = f"a data worker ended (exit status {process.returncode}) while it read {span(rows)}"
                if attempt == 2:
                    raise DataError(f"{message}, twice. Is there too little memory, or does a row crash it?") from None
                logger.warning("%s; another one tries again", message)
            else:
                result = pickle.loads(answer)
                if isinstance(result, Exception):
                    raise result
                return result
        raise AssertionError("unreachable")

    def _start(self, number: int) -> subprocess.Popen:
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
        process = subprocess.Popen(
            [sys.executable, "-m", "colloid.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        self._processes[number] = process
        if self._closed:
            process.kill()
        with contextlib.suppress(BrokenPipeError):  # Found by the first task, which tells.
            write_frame(process.stdin, self._setup)
        return process

    def _end(self, number: int) -> None:
        process = self._processes.pop(number, None)
        if process is not None:
            process.kill()
            process.wait(END_TIMEOUT)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()


def write_frame(file: Any, body: bytes) -> None:
    """8 bytes of length, then the bytes."""
    file.write(HEADER.pack(len(body)))
    file.write(body)
    file.flush()


def read_frame(file: Any) -> bytes:
    """The next frame.

    Raises:
        EOFError: there is no whole one.
    """
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    size = HEADER.unpack(header)[0]
    body = file.read(size)
    if len(body) < size:
        raise EOFError
    return body


def span(rows: list[RawRow]) -> str:
    """How messages name rows."""
    first, last = rows[0], rows[-1]
    return f"the rows {place(first.path, first.number)} to {place(last.path, last.number)}"
