"""What every transport does around the weights themselves: pause -> begin -> … -> end -> continue, on all engines.

Every engine that was paused is continued, whatever happens in between. An engine that missed a part refuses to
generate until it gets a complete update.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from colloid.engines.control import EngineControl
from colloid.errors import EngineError, WeightSyncError

logger = logging.getLogger(__name__)

PAUSE_TIMEOUT = 120.0
"""Seconds for an engine to finish its step and stand still. One that hangs is found here, before it is sent weights."""
CONTINUE_TIMEOUT = 30.0
"""After a failure, which may be that an engine hangs."""

ALREADY_OPEN = "already open"
"""What SGLang says where an update was begun before and not ended."""

Payload = dict[str, Any] | Callable[[int], dict[str, Any]]
"""The body of a call, or what makes it of an engine's place in the list."""


def server_facts(engine: EngineControl, path: str = "/server_info") -> dict[str, Any]:
    """What an engine says of itself, before an update.

    Raises:
        WeightSyncError: it does not answer.
    """
    try:
        return engine.get(path)
    except EngineError as error:
        raise WeightSyncError(f"an engine that is to get weights does not answer: {error}") from error


class EngineUpdate:
    """One update of all engines to a version; a context in which they are paused.

    Args:
        engines: all are spoken to at the same time.
        pause_mode: what becomes of running requests: `in_place`, `retract` or `abort`.
        begins: whether tensors follow one by one; where an engine reads them itself there is no begin and no end.
        calls_at_once: to one engine.
    """

    def __init__(
        self,
        engines: Sequence[EngineControl],
        version: int,
        pause_mode: str = "retract",
        *,
        begins: bool = True,
        calls_at_once: int = 1,
    ):
        self.engines = list(engines)
        self.version = {"weight_version": str(version)}
        self._pause_mode, self._begins = pause_mode, begins
        self._threads = ThreadPoolExecutor(max(1, len(self.engines)) * calls_at_once, thread_name_prefix="weights")
        self._begin, self._has_begun = 0.0, False
        self.seconds_paused = 0.0
        """From the first engine's pause until all go on."""

    def __enter__(self) -> EngineUpdate:
        self._begin = time.monotonic()
        for engine in self.engines:
            engine.keep_connections()
        try:
            self.finish("pause", self.start("/pause_generation", {"mode": self._pause_mode}, timeout=PAUSE_TIMEOUT))
            if self._begins:
                self.begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def begin(self) -> None:
        """Has every engine begin an update, and end one that a sender which was killed has left open."""
        self._has_begun = True
        try:
            self.post("begin", "/begin_weight_update", self.version)
        except WeightSyncError as error:
            if ALREADY_OPEN not in str(error):
                raise
            self.give_up()
            self.post("begin", "/begin_weight_update", self.version)

    def give_up(self) -> None:
        """Ends what was begun, after a failure: SGLang would refuse all later updates. An embedded engine refuses this,
        and generates nothing until it has a complete update.
        """
        try:
            self.finish("end", self.start("/end_weight_update", timeout=CONTINUE_TIMEOUT))
        except WeightSyncError as refused:
            logger.debug("%s", refused)

    def post(
        self, what: str, path: str, payload: Payload | None = None, among: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Calls all engines, or those at some places in the list; returns their answers, in order.

        Raises:
            WeightSyncError: names the engines that failed.
        """
        return self.finish(what, self.start(path, payload, among))

    def start(
        self,
        path: str,
        payload: Payload | None = None,
        among: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Future[dict[str, Any]]]:
        """Calls engines without waiting for them; for `finish`.

        Args:
            timeout: seconds at most; no engine has longer than its own.
        """

        def call(index: int) -> Future[dict[str, Any]]:
            engine = self.engines[index]
            body = payload(index) if callable(payload) else payload
            most = engine.timeout if timeout is None else min(timeout, engine.timeout)
            return self._threads.submit(engine.post, path, body, timeout=most)

        return [call(index) for index in (range(len(self.engines)) if among is None else among)]

    def finish(self, what: str, calls: list[Future[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Waits for calls that were started; like `post`."""
        answers, failed = [], []
        for call in calls:
            try:
                answers.append(call.result())
            except EngineError as error:
                failed.append(str(error))
        if failed:
            raise WeightSyncError(
                f"weight update to version {self.version['weight_version']}, {what}: {len(failed)} of "
                f"{len(self.engines)} engines failed: {'; '.join(failed)}"
            )
        return answers

    def end(self, num_tensors: int) -> None:
        """Has every engine check that it got `num_tensors` tensors, all of its own, and switch to the version."""
        self.post("end", "/end_weight_update", self.version | {"num_tensors": num_tensors})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout = PAUSE_TIMEOUT if error is None else CONTINUE_TIMEOUT
        if error is not None and self._begins and self._has_begun:
            self.give_up()
        try:
            self.finish("continue", self.start("/continue_generation", timeout=timeout))
        except WeightSyncError as failed:
            # The first failure says more; an engine that is gone can't be continued either.
            if error is None:
                raise
            logger.warning("%s", failed)
        finally:
            self.seconds_paused = time.monotonic() - self._begin
            self._threads.shutdown()
            for engine in self.engines:
                engine.close()
