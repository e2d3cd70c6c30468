"""Engines that fail under load, are replaced, come and leave: every request is answered exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from colloid.engines.control import EngineControl
from colloid.engines.fleet import Fleet, FleetConfig
from colloid.engines.launch import EngineConfig
from colloid.engines.members import Tolerance
from colloid.rollout.client import EngineClient
from colloid.rollout.engine_pool import EnginePool

KEY = "key of the pool"
TOLERANCE = Tolerance(interval=0.3, timeout=2.0)
NEW_TOKENS = 48
DEADLINE = 60.0

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def config(tiny_model_dir, tmp_path_factory):
    engine = EngineConfig(
        str(tiny_model_dir(max_position=1024)),
        tmp_path_factory.mktemp("pool"),
        KEY,
        options={"enable-deterministic-inference": True, "max-total-tokens": 16384, "skip-tokenizer-init": True},
    )
    return FleetConfig((engine, engine), tolerance=TOLERANCE)


@pytest.fixture(scope="module")
def fleet(config):
    fleet = Fleet(config)
    fleet.start()
    yield fleet
    fleet.stop()


class Load:
    """Requests under way at all times, until it ends; each is known by its prompt, and its answer by its prompt."""

    def __init__(self, fleet: Fleet, width: int = 16):
        self.pool = EnginePool(fleet, 64)
        self._fleet, self._width = fleet, width
        self.answers: dict[int, list[list[int]]] = {}
        self._sent = 0
        self._stopping = False

    async def __aenter__(self) -> Load:
        fleet = self._fleet
        urls = [engine.url for engine in fleet.addresses]
        options = {"retry_delay": 0.05, "examine": self.pool.examine, "no_engine_deadline": DEADLINE}
        self.client = EngineClient(fleet.router_url, urls, api_key=KEY, **options)
        self.pool.attach(self.client)
        self._tasks = [asyncio.ensure_future(self._work()) for _ in range(self._width)]
        await self.until(lambda: len(self.answers) >= self._width, "requests are answered")
        return self

    async def __aexit__(self, *_error) -> None:
        self._stopping = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), DEADLINE)
        self.pool.detach()
        await self.client.close()

    async def until(self, fact, what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not fact():
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < deadline, f"waited {DEADLINE:g} s until {what}"
            await asyncio.sleep(0.02)

    async def more(self, count: int = 32) -> None:
        goal = len(self.answers) + count
        await self.until(lambda: len(self.answers) >= goal, f"{count} more requests are answered")

    async def until_replaced(self, count: int) -> None:
        """The driver's part: who joins gets weights (here it has them), and is admitted."""
        deadline = time.monotonic() + DEADLINE
        while (await self.pool.metrics())["engine/replaced"] < count:
            assert time.monotonic() < deadline
            joining = await self.pool.joining()
            await asyncio.to_thread(self._fleet.admit, joining.engines)
            await asyncio.sleep(0.05)

    async def _work(self) -> None:
        while not self._stopping:
            number, self._sent = self._sent, self._sent + 1
            params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": number}
            payload = {"input_ids": [1 + number % 60, 1 + number // 60 % 60], "sampling_params": params}
            answer = await self.client.generate(payload | {"return_logprob": True}, name=f"request {number}")
            self.answers.setdefault(number, []).append(answer["output_ids"])

    def check(self, fleet: Fleet) -> None:
        """Each request was answered once and whole; some of them as an engine alone says."""
        assert sorted(self.answers) == list(range(self._sent))
        assert all(len(found) == 1 and len(found[0]) == NEW_TOKENS for found in self.answers.values())
        control = EngineControl(fleet.addresses[0].url, KEY)
        for number in range(0, self._sent, max(1, self._sent // 8)):
            params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": number}
            ids = [1 + number % 60, 1 + number // 60 % 60]
            answer = control.post("/generate", {"input_ids": ids, "sampling_params": params})
            assert answer["output_ids"] == self.answers[number][0]


def pids(fleet: Fleet) -> list[int]:
    return fleet.pids[: len(fleet.pids) - 1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_an_engine_that_ends_or_hangs_under_load_is_replaced_and_its_requests_are_redone(fleet, number):
    before = pids(fleet)
    replaced = int(fleet.metrics()["engine/replaced"])

    async def run():
        async with Load(fleet) as load:
            os.kill(before[0], number)
            await load.more()
            await load.until_replaced(replaced + 1)
            await load.more()
            failed = load.client.failed_requests
        return load, failed

    load, failed = asyncio.run(run())
    load.check(fleet)
    assert failed and len(pids(fleet)) == 2 and before[0] not in pids(fleet) and before[1] in pids(fleet)
    with pytest.raises(ProcessLookupError):
        os.kill(before[0], 0)


def test_requests_wait_while_all_engines_are_gone(fleet):
    before = pids(fleet)
    replaced = int(fleet.metrics()["engine/replaced"])

    async def run():
        async with Load(fleet) as load:
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            await load.until_replaced(replaced + 2)
            await load.more()
        return load

    asyncio.run(run()).check(fleet)
    assert not set(before) & set(pids(fleet))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_router_that_ends_or_hangs_is_started_again_with_its_engines(fleet, number):
    url, pid = fleet.router_url, fleet.pids[-1]
    restarted = fleet.metrics()["router/restarted"]

    async def run():
        async with Load(fleet) as load:
            os.kill(pid, number)
            await load.until(lambda: fleet.pids[-1] != pid, "there is another router")
            await load.more()
        return load

    asyncio.run(run()).check(fleet)
    assert fleet.router_url == url and fleet.metrics()["router/restarted"] == restarted + 1
    workers = EngineControl(url, KEY).get("/workers")["workers"]
    assert {worker["url"].rstrip("/") for worker in workers} == {engine.url for engine in fleet.addresses}
