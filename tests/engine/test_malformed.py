"""Thousands of malformed requests to a real engine process: each is refused with words, and nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from safetensors.torch import load_file

from colloid.engines.control import EngineControl
from colloid.engines.router import Router, RouterConfig
from colloid.errors import EngineError
from colloid.weights.senders import SendOptions
from colloid.weights.transports import make_sender
from tests.engine.conftest import API_KEY
from tests.engine.malformed import MEMORY, UPDATES, Bad, draw, raw_requests
from tests.engine.models import prompt_of

pytestmark = pytest.mark.timeout(120)
PROMPT = prompt_of(20, 400, 1)
GOOD = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": True}}
CONNECTIONS = 32
SECONDS_A_REQUEST = 30
GROWTH_MIB = 64


def resident_mib(server) -> float:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def send_all(url: str, requests: list[Bad], key: str, *, may_close: bool = False) -> list[tuple[Bad, int, bytes]]:
    """(request, status, body) of each, over a few connections that are kept.

    Args:
        may_close: whether a server may close a connection instead of an answer.
    """
    timeout = aiohttp.ClientTimeout(total=SECONDS_A_REQUEST)
    waiting = list(reversed(requests))
    answers = []

    async def work(session: aiohttp.ClientSession) -> None:
        while waiting:
            bad = waiting.pop()
            headers = {"Authorization": f"Bearer {key if bad.key is None else bad.key}"}
            try:
                async with session.request(bad.method, url + bad.path, data=bad.body, headers=headers) as answer:
                    answers.append((bad, answer.status, await answer.read()))
            except aiohttp.ClientConnectionError:
                if not may_close:
                    raise

    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(work(session) for _ in range(CONNECTIONS)))
    return answers


def check_refused(answers: list[tuple[Bad, int, bytes]]) -> Counter:
    """Every answer is 200, or 4xx with words; returns how many had which status."""
    for bad, status, body in answers:
        if status == 200:
            continue
        what = f"{bad.method} {bad.path[:60]} {(bad.body or b'')[:300]!r}: {status} {body[:300]!r}"
        assert 400 <= status < 500, what
        if bad.method != "HEAD":
            assert len(json.loads(body)["error"]["message"]) > 8, what
    return Counter(status for _, status, _ in answers)


def check_sound(server, expected: dict) -> None:
    """It answers as before, and nothing of other requests is in its cache."""
    server.wait_until(lambda load: load["num_running_reqs"] == load["num_queued_reqs"] == 0, "the engine is idle")
    assert server.load["num_used_tokens"] == 0
    assert server.post("/generate", GOOD)["output_ids"] == expected["output_ids"]


def send_malformed(server, count: int, seed: int) -> Counter:
    rng = random.Random(seed)
    return check_refused(asyncio.run(send_all(server.url, [draw(rng) for _ in range(count)], API_KEY)))


@pytest.mark.parametrize(
    "count", [1500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=str
)
def test_malformed_requests_are_refused_with_words_and_leave_nothing_behind(server, count):
    expected = server.post("/generate", GOOD)
    send_malformed(server, 300, seed=1)
    before = resident_mib(server)
    statuses = send_malformed(server, count, seed=2)
    assert sum(statuses.values()) == count and statuses[200] < 0.2 * count, statuses
    assert {400, 401, 404, 405} <= set(statuses)
    check_sound(server, expected)
    assert resident_mib(server) - before < GROWTH_MIB, "memory grew"


def test_malformed_requests_through_the_router_harm_neither_it_nor_the_engine(server, tmp_path):
    expected = server.post("/generate", GOOD)
    rng = random.Random(4)
    drawn = (draw(rng) for _ in range(400))
    bad = [each for each in drawn if each.path in ("/generate", "/v1/chat/completions", "/v1/completions")]
    router = Router(RouterConfig(), API_KEY, tmp_path)
    try:
        router.register(server.url)
        answers = asyncio.run(send_all(router.url, bad, API_KEY, may_close=True))
        assert len(answers) > 0.9 * len(bad)
        for each, status, body in answers:
            assert status == 200 or 400 <= status < 500, (each, status, body[:200])
        again = EngineControl(router.url, API_KEY).post("/generate", GOOD)
        assert again["output_ids"] == expected["output_ids"]
    finally:
        router.stop()
    check_sound(server, expected)


def test_giant_bodies_are_refused(server):
    expected = server.post("/generate", GOOD)
    text = json.dumps({"text": "a" * (8 << 20)}).encode()
    ids = json.dumps({"input_ids": [1] * (1 << 20)}).encode()
    bads = [Bad("POST", "/generate", text), Bad("POST", "/generate", ids), Bad("POST", "/generate", b"[" * (4 << 20))]
    statuses = check_refused(asyncio.run(send_all(server.url, bads, API_KEY)))
    assert statuses == {400: 3}
    # Longer than any request may be: refused by what it says of itself, before it is there.
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), 30) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
        connection.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    check_sound(server, expected)


@pytest.mark.parametrize("closes", [True, False], ids=["half closed", "left open"])
def test_what_is_not_http_harms_no_one(server, closes):
    expected = server.post("/generate", GOOD)
    parts = urlsplit(server.url)
    left = []
    for data in raw_requests(parts.netloc):
        connection = socket.create_connection((parts.hostname, parts.port), 10)
        connection.sendall(data)
        if closes:
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
            assert not answer or re.match(rb"HTTP/\d\.\d 4", answer), (data[:80], answer[:200])
            connection.close()
        else:
            left.append(connection)
    check_sound(server, expected)
    for connection in left:
        connection.close()
    check_sound(server, expected)


def test_malformed_updates_break_no_engine_and_a_complete_one_repairs_what_they_began(server, tmp_path):
    expected = server.post("/generate", GOOD)
    rng = random.Random(3)
    drawn = (draw(rng) for _ in range(4000))
    bad = [each for each in drawn if each.path in UPDATES and each.path != "/begin_weight_update"]
    control = EngineControl(server.url, API_KEY)
    control.post("/pause_generation", {"mode": "retract"})
    control.post("/begin_weight_update", {"weight_version": "9"})
    statuses = check_refused(asyncio.run(send_all(server.url, bad[:400], API_KEY)))
    assert statuses[400] > 300, statuses
    control.post("/begin_weight_update", {"weight_version": "9"})
    # A shared memory that is there, but not the sender's; and tensors that the model does not have.
    memory = tmp_path / "memory"
    memory.write_bytes(b"\0" * 4096)
    body = UPDATES["/update_weights_from_tensor"]
    for path in (str(memory), "/etc/passwd", "/dev/zero", "/dev/shm"):
        with pytest.raises(EngineError, match="status 400"):
            control.post("/update_weights_from_tensor", body | {"shared_memory": MEMORY | {"path": path}})
    with pytest.raises(EngineError, match="status 400.*a weight update was not completed"):
        control.post("/continue_generation")
    assert "not completed" in server.post("/generate", GOOD, status=503)["error"]["message"]
    tensors = load_file(server.model_path / "model.safetensors")
    options = SendOptions("tensor", "full", 1 << 18, "retract", server.model_path, tmp_path / "weights")
    sender = make_sender(options)
    try:
        sender.send([control], 0, iter(tensors.items()))
    finally:
        sender.close()
    check_sound(server, expected)
