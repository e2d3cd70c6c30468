"""What `train.py` does around the loop: options first, and errors as a person wants to read them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from colloid.config.parse import parse_program
from colloid.errors import ConfigError, DataError, HookError, ProcessFailed, written_for_user
from colloid.observe.logs import NOT_ON_CONSOLE
from colloid.restarts import Beginning, Restarts, taken_over

EXIT_USER_ERROR = 2
EXIT_FAILURE = 1

logger = logging.getLogger(__name__)


def run_tool(work: Callable[[], None]) -> None:
    """Runs a tool's work, and ends the process with 2 (a mistake of the user) or 1 where it fails."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        work()
    except Exception as error:
        cause = written_for_user(error)
        if cause is None:
            raise
        print(f"error: {cause}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR if isinstance(cause, ConfigError | DataError) else EXIT_FAILURE)


def run_entry(entry: str) -> None:
    """Parses the command line and trains. Ends the process: 0, 2 (a mistake in options, data or a hook) or 1.

    With `--max-restarts` a run that fails otherwise begins again.
    """
    restart, beginning = taken_over(), Beginning.now()
    args, given = parse_program(None, entry, restart)
    from colloid import loop  # after the options: --help and mistakes in them must not wait for Ray

    restarts = Restarts(args, given)
    try:
        (loop.train_async if entry == "train_async" else loop.train)(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        cause = written_for_user(error)
        if cause is None or isinstance(cause, ProcessFailed):
            logger.exception("the run failed")
        if cause is not None:
            print(f"error: {cause}", file=sys.stderr)
            logger.info("error: %s", cause, extra=NOT_ON_CONSOLE)
            logger.debug("the run failed", exc_info=error)
        again = restarts.next(error)
        if again is not None:
            beginning.begin_again(again)
        sys.exit(EXIT_USER_ERROR if isinstance(cause, ConfigError | DataError | HookError) else EXIT_FAILURE)
