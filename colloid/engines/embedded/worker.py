"""The compute thread: runs the engine's steps, and between two steps whatever the server asks for.

The server's event loop hands over functions and awaits their results; so the engine's state has one owner and needs
no locks, and a request that was aborted is out of the batch when the answer comes.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from colloid.engines.embedded.engine import Engine

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Worker:
    """`on_failure(error)` is called in the event loop if a step raises: the engine's state is unknown then."""

    def __init__(self, engine: Engine, on_failure: Callable[[BaseException], None]):
        self.engine = engine
        self.is_paused = False
        self.is_alive = True
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        self._inbox.put(None)
        self._thread.join(timeout=30)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a function in the compute thread, between two steps; returns or raises what it does."""
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = function(*args)
            except Exception as error:
                self.post(_settle, future, None, error)
            else:
                self.post(_settle, future, result, None)

        self._inbox.put(run)
        return await future

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Runs a function in the event loop, from the compute thread."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the event loop is closed: nobody waits for this any more")

    def _run(self) -> None:
        try:
            while self._serve_inbox():
                if not self.is_paused:
                    self.engine.step()
        except BaseException as error:
            logger.exception("a generation step failed; the engine stops")
            self.is_alive = False
            self.post(self._on_failure, error)

    def _serve_inbox(self) -> bool:
        """Runs what was asked for, waiting for it while there is nothing to compute. False: stop."""
        while True:
            idle = self.is_paused or not self.engine.scheduler.has_work
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            item()


def _settle(future: asyncio.Future, result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
