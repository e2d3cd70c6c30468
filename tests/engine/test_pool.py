"""Engines that fail under load, are replaced, come and leave: every request is answered exactly once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from colloid.config.external import external_addresses
from colloid.engines.control import EngineControl
from colloid.engines.fleet import External, Fleet, FleetConfig
from colloid.engines.launch import EngineConfig, launch_engine
from colloid.engines.members import Tolerance
from colloid.errors import DeadlineExceeded, EngineError
from colloid.rollout.client import EngineClient
from colloid.rollout.engine_pool import EnginePool

KEY = "key of the pool"
TOLERANCE = Tolerance(interval=0.3, timeout=2.0)
NEW_TOKENS = 48
DEADLINE = 60.0
WAYS = [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="hung", marks=pytest.mark.slow)]

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


@pytest.mark.parametrize("number", WAYS)
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


@pytest.mark.slow
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


@pytest.mark.parametrize("number", WAYS)
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


class Garbage(BaseHTTPRequestHandler):
    """Is healthy, and answers every request with bytes that are no JSON, or with JSON of another form."""

    answers = (b"<html>", b"[1, 2]", b'{"output_ids": "abc", "meta_info": {}}')
    count = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        Garbage.count += self.path == "/generate"
        self._send(self.answers[Garbage.count % 3] if self.path == "/generate" else b"{}")

    def do_GET(self) -> None:
        facts = {"model_path": "/nowhere", "engine": "embedded", "served_model_name": "garbage"}
        self._send(b"" if self.path == "/metrics" else json.dumps(facts).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def garbage():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Garbage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def outsiders(config):
    """Three engines that run already, in processes of their own."""
    started = [launch_engine(config.engines[0], f"outsider_{number}", number) for number in range(3)]
    yield [SimpleNamespace(url=engine.wait_until_ready(), handle=engine) for engine in started]
    for engine in started:
        engine.stop()


def external_fleet(config, tmp_path, urls):
    listed = tmp_path / "engines.txt"

    def write(urls):
        listed.write_text("# the engines\n" + "\n".join(url.removeprefix("http://") for url in urls))
        # Written a while ago: what is new may not be whole yet.
        os.utime(listed, (time.time() - 5 + write.count, time.time() - 5 + write.count))
        write.count += 1

    write.count = 0
    write(urls)
    values = [f"@{listed}"]
    external = External(tuple(urls), file=listed, read=lambda: external_addresses(values))
    fleet = Fleet(FleetConfig(api_key=KEY, log_dir=config.log_dir / "external", external=external, tolerance=TOLERANCE))
    return fleet, write


def test_engines_join_and_leave_a_list_under_load_and_go_on_by_themselves(config, outsiders, tmp_path):
    first, second, third = (outsider.url for outsider in outsiders)
    fleet, write = external_fleet(config, tmp_path, [first, second])
    fleet.start()

    def serving():
        return {engine.url for engine in fleet.addresses} - {engine.url for engine in fleet.joining}

    def tokens_of_third():
        return EngineControl(third, KEY).get("/server_info")["internal_states"][0]["generation_tokens_total"]

    async def run():
        async with Load(fleet) as load:
            write([second, third])
            await load.until(lambda: fleet.joining, "the third engine is there")
            assert serving() == {second} and tokens_of_third() == 0, "no request before it has the weights"
            await load.more()
            await asyncio.to_thread(fleet.admit, fleet.joining)
            assert serving() == {second, third}
            await load.until(tokens_of_third, "the router gives it requests")
            assert load.client.failed_requests == 0
            write([])  # a list without engines is not followed
            await load.more()
            assert serving() == {second, third}
        return load

    try:
        load = asyncio.run(run())
        load.check(fleet)
        metrics = fleet.metrics()
        assert (metrics["engine/joined"], metrics["engine/left"], metrics["engine/replaced"]) == (1, 1, 0)
    finally:
        fleet.stop()
    assert all(outsider.handle.exit_code is None for outsider in outsiders)


def test_an_engine_that_answers_garbage_is_found_and_taken_out(config, outsiders, garbage, tmp_path):
    fleet, write = external_fleet(config, tmp_path, [outsiders[0].url, garbage])
    fleet.start()

    async def run():
        async with Load(fleet) as load:
            await load.until(lambda: garbage not in {engine.url for engine in fleet.addresses}, "it is out")
            await load.more()
        return load

    try:
        load = asyncio.run(run())
        load.check(fleet)
        assert load.client.failed_requests and Garbage.count
    finally:
        fleet.stop()


@pytest.mark.slow
def test_requests_at_a_hung_engine_of_somebody_elses_are_redone(config, outsiders, tmp_path):
    """Nothing ends its connections."""
    fleet, write = external_fleet(config, tmp_path, [outsider.url for outsider in outsiders[:2]])
    fleet.start()
    hung = outsiders[1].handle.pid

    async def run():
        async with Load(fleet) as load:
            os.kill(hung, signal.SIGSTOP)
            await load.until(lambda: len(fleet.addresses) == 1, "it is out")
            await load.more()
            os.kill(hung, signal.SIGCONT)
            await load.until_replaced(1)
            await load.more()
        return load

    try:
        asyncio.run(run()).check(fleet)
    finally:
        os.kill(hung, signal.SIGCONT)
        fleet.stop()


@pytest.mark.slow
def test_without_a_tolerance_an_engine_that_ended_or_hangs_is_named(config, tmp_path):
    fleet = Fleet(replace(config, tolerance=None, log_dir=tmp_path))
    fleet.start()
    pool = EnginePool(fleet, 64)

    async def run(pid, number):
        urls = [engine.url for engine in fleet.addresses]
        options = {"progress_deadline": 2.0, "max_attempts": 1, "abort_timeout": 1.0}
        client = EngineClient(fleet.router_url, urls, api_key=KEY, **options)
        pool.attach(client)
        params = {"max_new_tokens": 900, "ignore_eos": True}
        sent = (client.generate({"input_ids": [1 + 4 * row], "sampling_params": params}) for row in range(12))
        work = asyncio.gather(*sent, return_exceptions=True)
        await asyncio.sleep(0.3)
        os.kill(pid, number)
        try:
            await asyncio.wait_for(pool.or_failure(until(work)), DEADLINE)
        finally:
            pool.detach()
            await client.close()

    async def until(work):
        found = await work
        assert any(isinstance(each, Exception) for each in found), "some were at the engine"
        raise next(each for each in found if isinstance(each, Exception))

    try:
        hung, ended = pids(fleet)
        with pytest.raises((EngineError, DeadlineExceeded)):
            asyncio.run(run(hung, signal.SIGSTOP))
        with pytest.raises(EngineError, match="engine http://.* [(]engine_0[)] does not answer its health check"):
            fleet.check()
        os.kill(hung, signal.SIGCONT)
        with pytest.raises(EngineError):  # what failed because of it, or its end itself, whichever is seen first
            asyncio.run(run(ended, signal.SIGKILL))
        with pytest.raises(EngineError, match=rf"engine_1, pid {ended}[)] ended with -9"):
            fleet.check()
    finally:
        fleet.stop()
