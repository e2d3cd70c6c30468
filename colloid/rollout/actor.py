"""The Ray side of the rollout: one actor that owns the data source, the engines with their router, and the manager."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from colloid.config.placement import Placement
from colloid.config.sft import serves
from colloid.engines.control import EngineAddress
from colloid.engines.fleet import Fleet
from colloid.engines.launch import Launch
from colloid.engines.memory import EngineMemory
from colloid.errors import DeadlineExceeded, EngineError
from colloid.observe.logs import setup_logging
from colloid.observe.resident import Resident, take_tree
from colloid.rollout.debug import LoadedRollouts
from colloid.rollout.engine_pool import API_KEY_VARIABLE, EnginePool, Joining
from colloid.rollout.manager import RolloutManager
from colloid.rollout.servers import Servers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineAccess:
    """What the trainer needs to reach the engines."""

    addresses: list[EngineAddress]
    """At the start."""
    api_key: str
    pids: list[int]
    """Of engines and routers, for logs and tests."""
    changes: bool = False
    """Whether there may be others later."""


@dataclass(frozen=True)
class RolloutHandle:
    """What the driver gets of a rollout: references to the data, and its metrics."""

    batches: list[Any]
    """One Ray reference to a `RankBatch` a data-parallel rank; none where there is no trainer."""
    num_tokens: int
    """Prompt and response tokens that are trained: of the samples in a micro-batch."""
    metrics: dict[str, float]


class RolloutActor:
    """Data first (`load_data`), then engines (`start`): a mistake in the data shows before anything heavy starts."""

    def __init__(self, args: Any):
        setup_logging(args.run_dir, "rollout")
        self._args = args
        self._manager: RolloutManager | LoadedRollouts | None = None
        self._servers: Servers | None = None
        self._pool: EnginePool | None = None

    def load_data(self) -> int:
        """Reads and checks data, reward and hooks. Returns the prompts in the training data set, after the filters."""
        self._manager = LoadedRollouts(self._args) if self._args.debug_train_only else RolloutManager(self._args)
        return self._manager.dataset_length()

    async def start(self, num_rollout: int, placement: Placement | None, launch: Launch) -> EngineAccess:
        """Starts all models that are served, each with its router. Returns when they serve.

        Args:
            launch: starts an engine where the placement has it.
        """
        args = self._args
        args.num_rollout = num_rollout
        if not serves(args):
            return EngineAccess([], "", [])
        api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(24)
        self._memory = EngineMemory(api_key)
        self._servers = Servers(args, api_key, partial(Fleet, launch=launch), placement)
        await asyncio.to_thread(self._servers.start)  # meanwhile this process answers whether it lives
        self._pool = self._servers.policy
        fleet = self._pool.fleet
        addresses = fleet.addresses
        await self._manager.start(
            fleet.router_url,
            [address.url for address in addresses],
            api_key,
            frozen=self._servers.frozen_clients(),
            examine=self._pool.examine,
        )
        self._pool.attach(self._manager.client)
        return EngineAccess(addresses, api_key, self._servers.pids, fleet.changes)

    async def generate(self, rollout_id: int, weight_version: int, trained: int, after: int | None) -> RolloutHandle:
        """One rollout; its data stays in the object store, one object a data-parallel rank.

        Args:
            weight_version, trained, after: see `RolloutManager.generate`. Calls that wait for each other are not
                always begun in the order in which they were made.
        """
        import ray

        with self._ended_engines_named():
            making = self._manager.generate(rollout_id, weight_version, trained=trained, after=after)
            result = await (making if self._servers is None else self._servers.or_failure(making))
        metrics = result.metrics if self._servers is None else result.metrics | await self._servers.metrics()
        num_tokens = sum(batch.num_scheduled_tokens for batch in result.batches)
        return RolloutHandle([ray.put(batch) for batch in result.batches], num_tokens, metrics)

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """All evaluation sets, on the weights that the engines hold."""
        with self._ended_engines_named():
            evaluating = self._manager.evaluate(rollout_id)
            return await (evaluating if self._servers is None else self._servers.or_failure(evaluating))

    async def save(self, directory: str, rollout_id: int) -> None:
        """Data source with buffer and counters, into an existing directory."""
        async with self._manager.interrupted():
            self._manager.save(directory, rollout_id)

    def load(self, directory: str, rollout_id: int) -> None:
        """The inverse of `save`."""
        self._manager.load(directory, rollout_id)

    async def begin_update(self, pause_mode: str) -> list[EngineAddress]:
        """Weights are to change. Returns the engines that take them, once requests are as `pause_mode` wants them."""
        if pause_mode in ("abort", "drain"):
            await self._manager.hold_requests(drain=pause_mode == "drain")
        await self._pool.targets()
        await asyncio.to_thread(self._pool.fleet.pause_checks)
        return await self._pool.targets()  # those of now: until `end_update` none leaves

    async def left_after_failed_update(
        self, engines: list[EngineAddress], words: str, attempt: int
    ) -> list[EngineAddress]:
        """See `EnginePool.left_after`."""
        return await self._pool.left_after(engines, words, attempt)

    async def end_update(self, weight_version: int, engines: list[EngineAddress]) -> None:
        """These engines hold `weight_version`; requests are sent again."""
        await asyncio.to_thread(self._pool.fleet.resume_checks)
        self._manager.release_requests(weight_version)
        await self.admit(engines)  # a router may take a minute until it knows that one of them hangs

    async def joining(self) -> Joining:
        """The engines that lack nothing but the current weights."""
        return await self._pool.joining()

    async def admit(self, engines: list[EngineAddress]) -> None:
        """These hold the current weights: they serve."""
        await asyncio.to_thread(self._pool.fleet.admit, engines)

    async def drop(self, engines: list[EngineAddress], reason: str) -> None:
        """These are not used any more."""
        await asyncio.to_thread(self._pool.fleet.drop, engines, reason)

    async def release_memory(self, tags: list[str]) -> None:
        """Has the engines that are given the trainer's weights release memory; no request may be under way."""
        await self._pool.change_memory(lambda urls: self._memory.release(urls, tags), self._is_released, releases=True)

    async def resume_memory(self, tags: list[str]) -> None:
        """The inverse; weights are not there by it."""
        await self._pool.change_memory(lambda urls: self._memory.resume(urls, tags), self._is_released, releases=False)

    def _is_released(self) -> bool:
        return self._memory.is_released

    def engines_resident(self) -> Resident:
        """What the engines on this host hold, which this process has started; see `TrainWorker.resident`."""
        return Resident() if self._servers is None else take_tree(self._servers.policy.fleet.engine_pids)

    async def close(self) -> set[str]:
        """Ends clients, graders, engines and routers. Returns the options that this process has read."""
        try:
            if self._manager is not None:
                await self._manager.close()
        finally:  # a hook's or a data source's end that fails leaves no engine behind
            if self._servers is not None:
                self._servers.stop()
        return self._args.options_read()

    def check_engines(self) -> None:
        """Raises `EngineError` where an engine or the router has ended, or does not answer."""
        if self._servers is not None:
            self._servers.check()

    @contextmanager
    def _ended_engines_named(self) -> Iterator[None]:
        """Where an engine or the router has ended, that is the error, rather than what failed because of it."""
        try:
            yield
        except (EngineError, DeadlineExceeded):
            if self._servers is not None:
                self._servers.check()
            raise
