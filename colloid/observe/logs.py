"""Where log records go: short lines to the console, whole ones to the run's `log.txt`.

The console shows colloid's own records from INFO on and those of libraries from WARNING on. Python warnings, of which
the libraries below give many, go to `log.txt` alone. Several processes of a run may append to the same `log.txt`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from datetime import datetime
from pathlib import Path

LOG_FILE = "log.txt"
NOT_ON_CONSOLE = {"on_console": False}
"""`extra` of a record that stands in `log.txt` alone, as the console has it in another form."""

_warned: set[tuple[str, str]] = set()
_warned_lock = threading.Lock()


def setup_logging(run_dir: str | Path | None, name: str, *, console: bool = True, level: int = logging.INFO) -> None:
    """Sends the log records of this process to the console and to `run_dir/log.txt`. A second call replaces the first.

    Args:
        run_dir: None: the console alone.
        name: of this process ("driver", "trainer 0"), as it stands in `log.txt`.
        console: whether records go to stderr too.
        level: the lowest level of colloid's own records.
    """
    targets: list[logging.Handler] = []
    warnings_target: logging.Handler = logging.NullHandler()
    if run_dir is not None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        warnings_target = _LogFile(Path(run_dir) / LOG_FILE, encoding="utf-8")
        warnings_target.setFormatter(_FileFormatter(name))
        targets.append(warnings_target)
    if console:
        handler = _ConsoleHandler()
        handler.setFormatter(_ConsoleFormatter())
        targets.append(handler)
    _replace_handlers(logging.getLogger(), targets)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("colloid").setLevel(level)

    logging.captureWarnings(True)
    python_warnings = logging.getLogger("py.warnings")
    _replace_handlers(python_warnings, [warnings_target])
    python_warnings.propagate = False


def warn_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Logs a warning, unless this process has given the same one (message and arguments) before."""
    key = (logger.name, message % args if args else message)
    with _warned_lock:
        if key in _warned:
            return
        _warned.add(key)
    logger.warning(message, *args)


def _replace_handlers(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    for old in list(logger.handlers):
        # Only what an earlier call put there: pytest, for one, has handlers of its own on the root logger.
        if getattr(old, "of_colloid", False):
            logger.removeHandler(old)
            old.close()
    for handler in handlers:
        handler.of_colloid = True
        logger.addHandler(handler)


class _LogFile(logging.FileHandler):
    """A log file whose disk may fill up: that is said once, and ends nothing."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            sys.stderr.write(f"warning: {self.baseFilename} cannot be written: {error}\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # Of what is still in its buffer: `handleError` has said so.
            super().close()


class _ConsoleHandler(logging.Handler):
    """Lines on stderr, above a progress bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "on_console", True):
            return
        try:
            line = self.format(record)
            if sys.stderr.isatty():
                from tqdm import tqdm

                tqdm.write(line, file=sys.stderr)
            else:
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _ConsoleFormatter(logging.Formatter):
    """`12:03:11 message`; the level from WARNING on."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = f"{datetime.fromtimestamp(record.created):%H:%M:%S} {level}{record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _FileFormatter(logging.Formatter):
    """`2026-01-31T12:03:11.123+01:00 INFO driver colloid.loop: message`; further lines of a record are indented."""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        text = f"{when} {record.levelname} {self._process} {record.name}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text.rstrip("\n").replace("\n", "\n    ")
