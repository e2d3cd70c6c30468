"""What a client knows of the engines, which come and go while it works: where to send, whom to tell of an abort, how
many requests may be in flight; and of whom it has been told that they are lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from colloid.engines.members import PoolView
from colloid.errors import DeadlineExceeded
from colloid.rollout.direct import DirectRequests


class Serving:
    """The engines and the router of now.

    Args:
        connections: requests in flight, of all engines together.
        deadline: seconds that requests wait for an engine where none serves.
        through_router: see `DirectRequests`.
    """

    def __init__(
        self,
        router_url: str,
        engine_urls: Sequence[str],
        connections: int,
        deadline: float,
        *,
        through_router: bool = False,
    ):
        self.router_url = router_url.rstrip("/")
        self.urls = [url.rstrip("/") for url in engine_urls]
        self.direct = DirectRequests(self.router_url, self.urls, through_router=through_router)
        self.slots = Slots(connections)
        self.losses = 0
        """How often an engine or the router was lost so far."""
        self._deadline = deadline
        self._cuts = 0
        self._cut: asyncio.Future[None] | None = None
        self._expelled: frozenset[str] = frozenset()
        self._open = asyncio.Event()
        self._open.set()

    def apply(self, view: PoolView, connections: int) -> set[str]:
        """The engines are others from now on; returns those whose requests are to be done elsewhere."""
        serving = [engine.url for engine in view.serving]
        self.urls = serving + [engine.url for engine in view.leaving]
        self.router_url = view.router_url.rstrip("/")
        self.direct.set_engines(self.router_url, serving)
        self.slots.resize(connections)
        self.losses = view.losses
        if view.cuts > self._cuts and self._cut is not None and not self._cut.done():
            self._cut.set_result(None)
        self._cuts = view.cuts
        expelled, self._expelled = set(view.expelled - self._expelled), view.expelled
        if serving and view.router_up:
            self._open.set()
        else:
            self._open.clear()
        return expelled

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait_until_open(self) -> None:
        """Returns once an engine serves.

        Raises:
            DeadlineExceeded: none does in time.
        """
        if self._open.is_set():
            return
        try:
            await asyncio.wait_for(self._open.wait(), self._deadline)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"no engine serves for {self._deadline:g} s, and none has come (router {self.router_url})"
            ) from None

    def cut(self) -> asyncio.Future[None]:
        """Is done when what is in flight now is to be sent again: it may be at an engine that will never answer."""
        if self._cut is None or self._cut.done():
            self._cut = asyncio.get_running_loop().create_future()
        return self._cut


class Slots:
    """Places for requests in flight, whose number can change; a context manager takes one, first come first served.

    Where it shrinks nobody is thrown out.
    """

    def __init__(self, limit: int):
        self._limit, self._used = limit, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def resize(self, limit: int) -> None:
        self._limit = limit
        self._wake()

    async def __aenter__(self) -> None:
        if self._used < self._limit and not self._waiting:
            self._used += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given one meanwhile
                self._release()
            raise

    async def __aexit__(self, *_error: object) -> None:
        self._release()

    def _release(self) -> None:
        self._used -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._used < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._used += 1
                turn.set_result(None)
