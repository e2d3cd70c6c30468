"""From the trainer's ranks to the engines: new versions to all of them, the current one to those that join.

    sync:  requests are held ──► every rank sends ──► joining engines serve as well ──► requests go on
    join:  the driver waits for a rollout: the trainer is idle ──► its ranks send to the newcomers alone ──► these serve

Where the trainer's weights are ahead of the engines' version, newcomers wait for the next sync; where no engine serves
at all that would never come, and it is made at once. With `--use-fault-tolerance` engines that fail in an update are
left out, and it is sent again to the others, which may have a part of it; so it is where a comparison that replaces
SGLang's weights did not get to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from colloid.engines.control import EngineAddress
from colloid.errors import WeightSyncError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Times that an update is sent, each time to those engines that are left."""


class WeightSync:
    """Used by the driver.

    Args:
        rollout, workers: the actors.
        wait: `(references, what)` -> their values.
        tolerates: whether engines may fail in an update.
        version: of the weights that the engines would hold after an update before the first one.
    """

    def __init__(
        self,
        rollout: Any,
        workers: Sequence[Any],
        wait: Callable[[list[Any], str], list[Any]],
        *,
        api_key: str,
        pause_mode: str,
        tolerates: bool,
        checks: bool,
        version: int = 0,
    ):
        self._rollout, self._workers, self._wait = rollout, workers, wait
        self._api_key, self._pause_mode = api_key, pause_mode
        self._tolerates, self._checks = tolerates, checks
        self.version = version
        self.is_ahead = True
        """Whether the trainer's weights are others than those of `version`."""

    def sync(self) -> dict[str, float]:
        """Sends the trainer's weights to all engines, as the next version.

        Raises:
            EngineError: an engine has ended, or does not answer.
            WeightSyncError: an engine did not take them. Nothing is left held or paused; one that has missed a part
                refuses to generate.
        """
        hold = self._rollout.begin_update.remote(self._pause_mode)
        engines = self._wait([hold], "running requests, before weights change")[0]
        try:
            version = self.version + 1
            metrics, engines = self._send("update_weights", engines, f"the weight update to version {version}")
            if self._checks:  # before any of them generates
                engines = self._check(version, engines)
        except BaseException:
            self._rollout.end_update.remote(self.version, [])
            raise
        self.version = version
        self.is_ahead = False
        self._wait([self._rollout.end_update.remote(self.version, engines)], "requests to go on")
        return metrics

    def _check(self, version: int, engines: Sequence[EngineAddress]) -> Sequence[EngineAddress]:
        """Raises `WeightSyncError` unless every engine holds exactly the trainer's tensors; returns those that do."""
        count, engines = self._send("check_weights", engines, "the engines' weights to be compared")
        logger.info("weight version %d: %d tensors equal on all engines (%d)", version, count, len(engines))
        return engines

    def serve_joining(self) -> None:
        """Engines that lack nothing but the current weights get them, where the trainer has these and is idle."""
        joining = self._wait([self._rollout.joining.remote()], "the list of engines")[0]
        if not joining.engines:
            return
        if self.is_ahead:
            if not joining.num_serving:
                logger.warning("no engine serves, and the trainer is ahead of version %d: a new one", self.version)
                self.sync()
            return
        try:
            what = f"version {self.version} to reach {', '.join(engine.url for engine in joining.engines)}"
            self._wait(self._calls("send_weights", joining.engines), what)
            if self._checks:
                self._wait(self._calls("check_weights", joining.engines), "the weights of new engines to be compared")
        except WeightSyncError as error:
            lost = [engine for engine in joining.engines if engine.is_named_in(str(error))] or joining.engines
            if not self._tolerates:
                there = self._wait([self._rollout.joining.remote()], "the list of engines")[0].engines
                if any(engine in there for engine in lost):
                    raise
                logger.warning("%s; taken out of the list meanwhile", error)
                return
            self._wait([self._rollout.drop.remote(lost, str(error))], "new engines to be taken out")
            return
        self._wait([self._rollout.admit.remote(joining.engines)], "new engines to be registered")

    def _send(self, verb: str, engines: Sequence[EngineAddress], what: str) -> tuple[Any, Sequence[EngineAddress]]:
        """Calls a verb of all ranks, again without those engines that failed; rank 0's result, and who is left."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._wait(self._calls(verb, engines), what)[0], engines
            except WeightSyncError as error:
                if not self._tolerates:  # one that has ended says more than that it did not answer
                    self._wait([self._rollout.check_engines.remote()], f"the engines' health: {what} failed")
                if not self._tolerates or attempt == MAX_ATTEMPTS:
                    raise
                left = self._rollout.left_after_failed_update.remote(engines, str(error), attempt)
                again = self._wait([left], "engines that can take weights")[0]
                if verb == "check_weights":  # one that came meanwhile has not been sent any
                    names = {engine.name for engine in again}
                    again = [engine for engine in engines if engine.name in names]
                if not again:
                    raise
                logger.warning("%s failed, and is repeated with %d engines: %s", what, len(again), error)
                engines = again
                if verb == "check_weights" and any(engine.kind == "sglang" for engine in engines):
                    # The comparison fills these with random values, and may have failed before all was sent again.
                    _, engines = self._send("send_weights", engines, "the weights after a failed comparison")
        raise AssertionError("unreachable")

    def _calls(self, verb: str, engines: Sequence[EngineAddress]) -> list[Any]:
        return [getattr(worker, verb).remote(list(engines), self._api_key) for worker in self._workers]
