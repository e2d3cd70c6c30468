"""Scalars as TensorBoard events, by TensorBoard's own file writer: neither TensorFlow nor torch is imported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardTracker:
    """Writes event files into a directory.

    Args:
        purge_step: TensorBoard forgets the points of earlier event files from that step on.
    """

    def __init__(self, directory: Path, purge_step: int | None):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(directory), flush_secs=30)
        if purge_step is not None:
            session = event_pb2.SessionLog
            self._add(step=purge_step, session_log=session(status=session.START))
            self._writer.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point a metric; with the operating system when this returns."""
        entries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=entries))
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), **fields))
