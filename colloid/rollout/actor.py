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

from colloid.config.algorithm import has_teacher_engine
from colloid.config.placement import Placement
from colloid.config.sft import serves
from colloid.engines.control import EngineAddress
from colloid.engines.fleet import Fleet, FrozenEngine
from colloid.engines.launch import Launch
from colloid.engines.memory import EngineMemory
from colloid.errors import DeadlineExceeded, EngineError
from colloid.observe.logs import setup_logging
from colloid.observe.resident import tree_resident_bytes
from colloid.rollout.debug import LoadedRollouts
from colloid.rollout.manager import RolloutManager
from colloid.rollout.servers import Servers, teacher_config

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "COLLOID_API_KEY"
"""Where a user may set the key that engines and router ask for; else each run draws its own."""


@dataclass(frozen=True)
class EngineAccess:
    """What the trainer needs to reach the engines."""

    addresses: list[EngineAddress]
    api_key: str
    pids: list[int]
    """Of engines, routers and teacher, for logs and tests."""


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
        self._teacher: FrozenEngine | None = None

    def load_data(self) -> int:
        """Reads and checks data, reward and hooks. Returns the prompts in the training data set, after the filters."""
        self._manager = LoadedRollouts(self._args) if self._args.debug_train_only else RolloutManager(self._args)
        return self._manager.dataset_length()

    async def start(self, num_rollout: int, placement: Placement, launch: Launch) -> EngineAccess:
        """Starts engines, router and teacher, where there are any. Returns when all of them serve.

        Args:
            launch: starts an engine where the placement has it.
        """
        args = self._args
        args.num_rollout = num_rollout
        if not serves(args):
            return EngineAccess([], "", [])
        api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(24)
        if has_teacher_engine(args) and not args.rm_url:
            self._teacher = FrozenEngine(teacher_config(args, api_key, placement), "teacher", launch)
        self._memory = EngineMemory(api_key)
        self._servers = Servers(args, api_key, partial(Fleet, launch=launch), placement)
        self._servers.start()
        addresses, pids = self._servers.policy.addresses, self._servers.pids
        teacher_url = None
        if self._teacher is not None:
            teacher_url = self._teacher.wait_until_ready()
            pids = [*pids, self._teacher.pid]
        await self._manager.start(
            self._servers.policy.router_url,
            [address.url for address in addresses],
            api_key,
            teacher_url=teacher_url,
            frozen=self._servers.frozen_urls(),
        )
        return EngineAccess(addresses, api_key, pids)

    async def generate(self, rollout_id: int, weight_version: int, trained: int, after: int | None) -> RolloutHandle:
        """One rollout; its data stays in the object store, one object a data-parallel rank.

        Args:
            weight_version, trained, after: see `RolloutManager.generate`. Calls that wait for each other are not
                always begun in the order in which they were made.
        """
        import ray

        with self._ended_engines_named():
            result = await self._manager.generate(rollout_id, weight_version, trained=trained, after=after)
        num_tokens = sum(batch.num_scheduled_tokens for batch in result.batches)
        return RolloutHandle([ray.put(batch) for batch in result.batches], num_tokens, result.metrics)

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """All evaluation sets, on the weights that the engines hold."""
        with self._ended_engines_named():
            return await self._manager.evaluate(rollout_id)

    async def save(self, directory: str, rollout_id: int) -> None:
        """Data source with buffer and counters, into an existing directory."""
        async with self._manager.interrupted():
            self._manager.save(directory, rollout_id)

    def load(self, directory: str, rollout_id: int) -> None:
        """The inverse of `save`."""
        self._manager.load(directory, rollout_id)

    async def hold_requests(self, drain: bool) -> None:
        """No request is sent until `release_requests`; with `drain`, returns when those that run have ended."""
        await self._manager.hold_requests(drain=drain)

    async def release_requests(self, weight_version: int) -> None:
        """The engines hold `weight_version`; requests are sent again."""
        self._manager.release_requests(weight_version)

    async def release_memory(self, tags: list[str]) -> None:
        """Has the engines that are given the trainer's weights release memory; no request may be under way."""
        await asyncio.to_thread(self._memory.release, self._policy_urls(), tags)

    async def resume_memory(self, tags: list[str]) -> None:
        """The inverse; weights are not there by it."""
        await asyncio.to_thread(self._memory.resume, self._policy_urls(), tags)

    def engines_resident(self) -> int:
        """Bytes that the engines on this host hold, which this process has started."""
        if self._servers is None:
            return 0
        fleet = self._servers.policy
        return tree_resident_bytes(fleet.pids[: len(fleet.addresses)])

    def _policy_urls(self) -> list[str]:
        return [address.url for address in self._servers.policy.addresses]

    async def close(self) -> set[str]:
        """Ends clients, graders, engines, router and teacher. Returns the options that this process has read."""
        try:
            if self._manager is not None:
                await self._manager.close()
        finally:  # a hook's or a data source's end that fails leaves no engine behind
            if self._servers is not None:
                self._servers.stop()
            if self._teacher is not None:
                self._teacher.stop()
        return self._args.options_read()

    @contextmanager
    def _ended_engines_named(self) -> Iterator[None]:
        """Where an engine or the router has ended, that is the error, rather than what failed because of it."""
        try:
            yield
        except (EngineError, DeadlineExceeded):
            if self._servers is not None:
                self._servers.check()
            raise
