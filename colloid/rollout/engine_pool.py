"""A fleet of engines inside the rollout actor: its clients follow its changes, and what it cannot survive ends what
waits for engines.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colloid.config.external import address_file, external_addresses, is_external
from colloid.config.rundir import weights_places
from colloid.engines.control import EngineAddress
from colloid.engines.external import Expected, check_engines
from colloid.engines.fleet import External, Fleet
from colloid.engines.launch import START_DEADLINE
from colloid.engines.members import PoolView, Tolerance
from colloid.errors import DeadlineExceeded, EngineError
from colloid.rollout.client import EngineClient

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "COLLOID_API_KEY"
"""Where a user may set the key that engines and router ask for; else each run draws its own."""
POLL_SECONDS = 0.2
NO_ENGINE_DEADLINE = max(START_DEADLINE.values()) + 300.0
"""Seconds without an engine after which a run ends: one may have to load its model first."""


@dataclass(frozen=True)
class Joining:
    """What the driver asks for while it waits.

    Attributes:
        engines: those that lack nothing but the current weights.
        num_serving: those that have them.
    """

    engines: list[EngineAddress]
    num_serving: int


class EnginePool:
    """Used from one event loop; `fleet` is started by the caller.

    Args:
        per_engine: requests in flight at each engine.
    """

    def __init__(self, fleet: Fleet, per_engine: int):
        self.fleet = fleet
        self._per_engine = per_engine
        self._client: EngineClient | None = None
        self._failed: asyncio.Future[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._num_serving = 0
        self._examining: asyncio.Task | None = None
        self._next: asyncio.Task | None = None

    def attach(self, client: EngineClient) -> None:
        """The client follows the fleet from now on; the fleet has been started."""
        loop = asyncio.get_running_loop()
        self._client, self._failed = client, loop.create_future()
        self._failed.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also if nobody waits
        self._unsubscribe = self.fleet.subscribe(lambda view: loop.call_soon_threadsafe(self._changed, view))

    def detach(self) -> None:
        """The client follows no more; before its event loop ends."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    async def examine(self) -> None:
        """Returns once all engines have been looked at by a look that began after the call. Many share one."""
        if self._examining is None or self._examining.done():
            self._examining = asyncio.ensure_future(asyncio.to_thread(self.fleet.examine))
            await asyncio.shield(self._examining)
            return
        if self._next is None or self._next.done():
            self._next = asyncio.ensure_future(self._examine_after(self._examining))
        await asyncio.shield(self._next)

    async def or_failure(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What `work` returns.

        Raises:
            EngineError: the fleet cannot go on, before it did; it is cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._failed.result()
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def joining(self) -> Joining:
        return Joining(await asyncio.to_thread(lambda: self.fleet.joining), self._num_serving)

    async def targets(self) -> list[EngineAddress]:
        """All engines that can take weights; waits for one where there is none.

        Raises:
            EngineError: the fleet cannot go on.
            DeadlineExceeded: none came.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + NO_ENGINE_DEADLINE
        while True:
            if self.fleet.failure is not None:
                raise self.fleet.failure
            found = await asyncio.to_thread(lambda: self.fleet.addresses)
            if found:
                return found
            if clock() > deadline:
                raise DeadlineExceeded(f"no engine has come within {NO_ENGINE_DEADLINE:.0f} s that could take weights")
            await asyncio.sleep(POLL_SECONDS)

    async def left_after(self, engines: Sequence[EngineAddress], words: str, attempt: int) -> list[EngineAddress]:
        """Who is to be sent weights again, after a weight update of `engines` failed with `words`; none: nobody, as the
        engines are not to blame.

        Args:
            attempt: which one failed, from 1 on. The first one without a culprit is simply repeated.
        """
        blamed = await asyncio.to_thread(self.fleet.drop_silent, engines)
        if not blamed and attempt > 1:
            named = [engine for engine in engines if engine.is_named_in(words)]
            if named and len(named) < len(engines):
                await asyncio.to_thread(self.fleet.drop, named, f"does not take weights: {words[:1000]}")
                blamed = named
        return [] if not blamed and attempt > 1 else await self.targets()

    async def change_memory(
        self, change: Callable[[list[str]], None], is_released: Callable[[], bool], *, releases: bool
    ) -> None:
        """Has all engines release or resume memory; those that fail are taken out, where failures are survived. While
        any lack a part of theirs, their health is not checked, and no engine is started: the trainer has the memory.

        Args:
            change: takes the engines' addresses; raises EngineError.
            is_released: whether any lacks a part now.
            releases: else resumes.
        """
        before = is_released()
        if releases:
            await asyncio.to_thread(self.fleet.hold_starts, True)
            await self._until_none_starts()
        else:
            await asyncio.to_thread(self.fleet.hold_starts, False)
        while True:
            engines = await (self._held() if releases else self.targets())
            try:
                await asyncio.to_thread(change, [engine.url for engine in engines])
                break
            except EngineError:
                if self.fleet.tolerance is None or not await asyncio.to_thread(self.fleet.drop_silent, engines):
                    raise
            finally:
                after = is_released()
                if after != before:
                    await asyncio.to_thread(self.fleet.pause_checks if after else self.fleet.resume_checks)
                before = after
        if before:
            await asyncio.to_thread(self.fleet.hold_starts, True)

    async def _held(self) -> list[EngineAddress]:
        """The engines that there are while none may be started: perhaps none.

        Raises:
            EngineError: the fleet cannot go on.
        """
        if self.fleet.failure is not None:
            raise self.fleet.failure
        return await asyncio.to_thread(lambda: self.fleet.addresses)

    async def metrics(self) -> dict[str, float]:
        """Of the run so far; empty where engines neither are replaced nor come and go."""
        found = await asyncio.to_thread(self.fleet.metrics)
        return found | {"engine/failed_requests": float(self._client.failed_requests)} if found else {}

    async def _until_none_starts(self) -> None:
        """An engine that is being started has the memory that is to be released."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + NO_ENGINE_DEADLINE
        while self.fleet.failure is None and await asyncio.to_thread(lambda: self.fleet.num_starting):
            if clock() > deadline:
                raise DeadlineExceeded(f"an engine is still being started after {NO_ENGINE_DEADLINE:.0f} s")
            await asyncio.sleep(POLL_SECONDS)

    async def _examine_after(self, running: asyncio.Task) -> None:
        await asyncio.wait({running})
        await asyncio.to_thread(self.fleet.examine)

    def _changed(self, view: PoolView) -> None:
        self._num_serving = len(view.serving)
        self._client.engines_changed(view, self._per_engine * max(1, self._num_serving))
        if self.fleet.failure is not None and not self._failed.done():
            self._failed.set_exception(self.fleet.failure)


def tolerance_of(args: Any) -> Tolerance | None:
    """What `--use-fault-tolerance` asks for."""
    if not args.use_fault_tolerance:
        return None
    return Tolerance(
        interval=args.rollout_health_check_interval,
        timeout=args.rollout_health_check_timeout,
        first_wait=args.rollout_health_check_first_wait,
    )


def external_of(args: Any) -> External | None:
    """The engines of `--rollout-external-engine-addrs`."""
    if not is_external(args):
        return None
    values = args.rollout_external_engine_addrs
    path = address_file(values)
    return External(
        external_addresses(values),
        expected_engine(args, args.rollout_engine),
        file=None if path is None else Path(path),
        read=lambda: external_addresses(values),
    )


def external_kind(args: Any) -> str:
    """Asks the engines of `--rollout-external-engine-addrs` what they are, before anything else starts.

    Raises:
        ConfigError: one does not answer, or does not fit the run.
    """
    addresses = external_addresses(args.rollout_external_engine_addrs)
    return check_engines(addresses, os.environ.get(API_KEY_VARIABLE), expected_engine(args))


def expected_engine(args: Any, kind: str | None = None) -> Expected:
    """What an engine must be to serve the run's model.

    Args:
        kind: that of the others.
    """
    config = args.hf_config or {}
    architectures = config.get("architectures")
    return Expected(
        model_type=config.get("model_type"),
        vocab_size=config.get("vocab_size"),
        architectures=tuple(architectures) if architectures else None,
        kind=kind,
        deterministic=bool(args.deterministic),
        transport=args.update_weight_transport,
        disk_dirs=tuple(weights_places(args)),
    )
