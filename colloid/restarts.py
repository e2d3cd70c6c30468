"""A run that failed begins again, in a fresh process of the same id, from its last checkpoint (`--max-restarts`).

    the run fails -> all that it started has ended -> exec of the same command line -> the options that the failed run
    had, with --load on its last checkpoint -> it goes on in the same run directory

The driver replaces itself: Ray cannot be started twice in a process, and whoever watches this one sees its exit code
and can send it signals, restarts or not. What the next one has to know is in a file without a name, whose descriptor
it inherits: options may hold secrets, and the files that they were read from may be other ones by now.

Each restart is a line of `restarts.jsonl` in the run directory: when, which, why, from what.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from colloid.checkpoints import MARKER, checkpoint_name
from colloid.config import Args
from colloid.config.restart import FOLLOWS_FROM_START, Restart, options_to_go_on
from colloid.errors import ConfigError, DataError, HookError, written_for_user

VARIABLE = "COLLOID_RESTART"
"""The environment variable with the descriptor of the file; it does not outlive the start."""
RESTARTS_FILE = "restarts.jsonl"

logger = logging.getLogger(__name__)


def taken_over() -> Restart | None:
    """What the failed run left to this process; None where there was none. A second call returns None."""
    descriptor = os.environ.pop(VARIABLE, None)
    if descriptor is None:
        return None
    with os.fdopen(int(descriptor), "rb") as file:
        return pickle.load(file)


@dataclass(frozen=True)
class Beginning:
    """What this process began with, and its successor is to begin with. To be noted after `taken_over`."""

    environment: dict[str, str]
    descriptors: frozenset[int]

    @classmethod
    def now(cls) -> Beginning:
        return cls(dict(os.environ), frozenset(_descriptors()))

    def begin_again(self, restart: Restart) -> NoReturn:
        """Replaces this process by a new one with the same command line."""
        with tempfile.TemporaryFile() as file:
            pickle.dump(restart, file)
            file.seek(0)
            for descriptor in _descriptors() - self.descriptors - {0, 1, 2}:
                os.set_inheritable(descriptor, False)  # libraries open some that an exec would leave open
            os.set_inheritable(file.fileno(), True)
            sys.stdout.flush()
            sys.stderr.flush()
            environment = {**self.environment, VARIABLE: str(file.fileno())}
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


class Restarts:
    """What a run has left of its restarts. To be made before the run starts.

    Args:
        given: the options that the user gave, as they were read.
    """

    def __init__(self, args: Args, given: dict[str, Any]):
        self._args, self._given = args, given
        self._allowed = args.max_restarts
        self._marker_before = _marker_time(args.save)

    def next(self, error: Exception) -> Restart | None:
        """How the run begins again after `error`; None where it is over: that was a mistake of the user's, which would
        be made again, or there were as many restarts as are allowed.
        """
        args = self._args
        number = args.num_restarts + 1
        written = written_for_user(error)
        if number > self._allowed or isinstance(written, ConfigError | DataError | HookError):
            return None
        options, place = self._given, args.resume_from or "the start"
        if _marker_time(args.save) != self._marker_before:  # else a checkpoint there is not of this run
            followed = {name: getattr(args, name) for name in FOLLOWS_FROM_START}
            options = options_to_go_on(self._given, args.save, followed)
            place = os.path.join(args.save, checkpoint_name(int(Path(args.save, MARKER).read_text())))
        failed_at, reason = time.time(), str(written or f"{type(error).__name__}: {error}")
        line = {"restart": number, "time": failed_at, "from": place, "reason": reason}
        with open(Path(args.run_dir) / RESTARTS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        logger.warning("the run failed, and begins again from %s (restart %d of %d)", place, number, self._allowed)
        return Restart(number, args.run_dir, args.run_name, options, failed_at)


def _marker_time(save: str | None) -> int | None:
    """When the last checkpoint was committed, in nanoseconds."""
    marker = Path(save, MARKER) if save else None
    return marker.stat().st_mtime_ns if marker is not None and marker.is_file() else None


def _descriptors() -> set[int]:
    """The open files of this process."""
    return {number for number in map(int, os.listdir("/dev/fd")) if _is_open(number)}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # that of the listing itself
        return False
    return True
