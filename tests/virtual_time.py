"""An event loop whose clock jumps to the next timer, so that schedules with long waits run at once, and repeat exactly."""

from __future__ import annotations

import asyncio
import selectors


class _JumpingSelector(selectors.SelectSelector):
    """Never blocks: a wait moves the loop's clock."""

    loop: VirtualTimeLoop

    def select(self, timeout=None):
        if timeout is None:
            raise AssertionError("every task waits, and no timer will wake one: a deadlock")
        self.loop.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For tasks that only sleep and wait for each other: no sockets, no threads."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now
