"""The router's part of a pool's health: it is started again where it ends or hangs.

answers ──► ended, or silent beyond the timeout ──► down: nothing is sent ──► started again ──► engines registered
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from colloid.engines.pool import Pool
from colloid.errors import ColloidError, EngineError

logger = logging.getLogger(__name__)

MAX_RESTART_FAILURES = 3
"""Times in a row that a router may fail to start again."""


class WatchedRouter(Protocol):
    """See `colloid.engines.router`."""

    url: str
    exit_code: int | None

    def answers(self, timeout: float) -> bool: ...

    def restart(self) -> None: ...

    def stop(self) -> None: ...


class RouterWatch:
    """Methods are called from the pool's thread.

    Args:
        background, clock: as of `Services`.
    """

    def __init__(
        self,
        router: WatchedRouter,
        pool: Pool,
        background: Callable[[Callable[[], Any], Callable[[Any], None]], None],
        clock: Callable[[], float],
    ):
        self._router, self._pool, self._background, self._clock = router, pool, background, clock
        self._next_check = clock() + (pool.tolerance.interval if pool.tolerance else 0.0)
        self._busy = False
        self._failures = 0
        self.restarted = 0

    def step(self) -> None:
        """Looks at it once."""
        tolerance = self._pool.tolerance
        if self._busy or self._pool.closed:
            return
        if self._router.exit_code is not None:
            self._down(f"ended with {self._router.exit_code}")
        elif tolerance and self._next_check <= self._clock():
            self.check()

    def check(self) -> None:
        """Asks it now, if it is not being asked."""
        tolerance = self._pool.tolerance
        if self._busy or tolerance is None:
            return
        self._busy = True
        self._background(lambda: self._router.answers(tolerance.timeout), self._answered)

    def _answered(self, answers: Any) -> None:
        self._busy = False
        if self._pool.closed:  # it was stopped
            return
        self._next_check = self._clock() + self._pool.tolerance.interval
        if answers is not True:
            self._down(f"does not answer its health check in {self._pool.tolerance.timeout:g} s")

    def _down(self, reason: str) -> None:
        self._busy = True
        self._pool.router_lost(reason)
        if self._pool.tolerance is not None:
            self._background(self._router.restart, self._restarted)

    def _restarted(self, result: Any) -> None:
        if self._pool.closed:  # the one before was stopped while this one was started
            self._router.stop()
            return
        if isinstance(result, ColloidError):
            self._failures += 1
            logger.error("the router could not be started (%d of %d): %s", self._failures, MAX_RESTART_FAILURES, result)
            if self._failures >= MAX_RESTART_FAILURES:
                error = f"the router could not be started {self._failures} times in a row: {result}"
                self._pool.fail(EngineError(error))
            else:
                self._background(self._router.restart, self._restarted)
            return
        self._busy, self._failures = False, 0
        self.restarted += 1
        self._pool.router_back()
