"""Processors of rows for tests; apart, so that a worker process imports little to unpickle them."""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np

from colloid.data.files import Columns
from colloid.data.rows import BadRow, PromptRow, TooLong, Usable


class Numbers:
    """A processor of rows `{"prompt": n}`: multiples of 7 are too long, multiples of 11 bad."""

    noun, limit_hint, max_tokens = "prompts", "", 5
    columns = Columns((("prompt", "--input-key"),))

    def __call__(self, rows):
        return [self._outcome(raw) for raw in rows]

    def _outcome(self, raw):
        number = (raw.data if isinstance(raw.data, dict) else json.loads(raw.data))["prompt"]
        if number % 11 == 10:
            return BadRow(f"{raw.path}:{raw.number}: eleven")
        if number % 7 == 6:
            return TooLong(6)
        return Usable(PromptRow(str(number), np.zeros(1, np.int32), None, {}, raw.number, raw.path), b"")


class Slow:
    """A processor that says in which process it runs, and sleeps or dies where a row says so."""

    noun, limit_hint, max_tokens, columns = "prompts", "", None, Columns(())

    def __call__(self, rows):
        for row in rows:
            if row.data == b"sleep":
                time.sleep(600)
            if row.data == b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            if row.data.startswith(b"once ") and not os.path.exists(row.data[5:]):
                open(row.data[5:], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return [(row.number, os.getpid()) for row in rows]
