"""Five hundred requests at once to a real engine: each gets what its own prompt gets alone, and none is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engine.models import prompt_of

pytestmark = pytest.mark.timeout(120)
NUM_REQUESTS = 500
NUM_KINDS = 60
SECONDS = 90
GROWTH_MIB = 350
"""With the kernels of all shapes that such a mixture has; twice that where they are not bounded."""
WAYS = {"plain": 0.45, "stream": 0.3, "abort": 0.15, "leave": 0.1}
"""What becomes of a request -> how often: `leave` closes its connection."""


def make_kinds() -> list[dict[str, Any]]:
    """Bodies whose answers differ: prompts with shared beginnings, of all lengths, drawn in several ways."""
    rng = random.Random(0)
    stems = [prompt_of(length, 400, 50 + length) for length in (1, 31, 32, 64, 200)]
    kinds = []
    for row in range(NUM_KINDS):
        tail = prompt_of(rng.randrange(1, 40), 400, row)
        params = {"max_new_tokens": rng.randrange(1, 24), "sampling_seed": row, "ignore_eos": rng.random() < 0.7}
        if row % 4 == 0:
            params |= {"temperature": 0.0}
        if row % 5 == 0:
            params |= {"top_p": 0.8, "top_k": 20, "frequency_penalty": 0.5}
        if row % 7 == 0:
            params |= {"n": 3}
        kinds.append({"input_ids": [*rng.choice(stems), *tail], "sampling_params": params, "return_logprob": True})
    return kinds


@dataclass
class Answer:
    """`samples`: (ids, log-probs, finish type) of each; None: the client left."""

    kind: int
    way: str
    rid: str
    samples: list[tuple[list[int], list[float], str]] | None


def samples_of(answers: Any) -> list[tuple[list[int], list[float], str]]:
    rows = answers if isinstance(answers, list) else [answers]
    return [
        (
            row["output_ids"],
            [entry[0] for entry in row["meta_info"]["output_token_logprobs"]],
            row["meta_info"]["finish_reason"]["type"],
        )
        for row in rows
    ]


async def last_events(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """The last event of each sample of a stream."""
    last: dict[int, dict[str, Any]] = {}
    ended = False
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            ended = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            last[event.get("index", 0)] = event
    assert ended, "a stream ended without [DONE]"
    return [last[index] for index in sorted(last)]


async def request(session: aiohttp.ClientSession, url: str, body: dict, answer: Answer, delay: float) -> Answer:
    await asyncio.sleep(delay)
    body = body | {"rid": answer.rid, "stream": answer.way == "stream"}
    try:
        limit = aiohttp.ClientTimeout(total=delay if answer.way == "leave" else SECONDS)
        async with session.post(f"{url}/generate", json=body, timeout=limit) as response:
            assert response.status == 200, await response.text()
            answers = await (last_events(response) if answer.way == "stream" else response.json())
    except asyncio.TimeoutError:
        assert answer.way == "leave", f"{answer.rid} was not answered within {SECONDS} s"
        return answer
    answer.samples = samples_of(answers)
    return answer


async def storm(server, kinds: list[dict[str, Any]]) -> list[Answer]:
    """All requests within half a second, and aborts of some of them."""
    rng = random.Random(1)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=server.headers, connector=connector) as session:

        async def abort(rid: str, delay: float) -> None:
            await asyncio.sleep(delay)
            async with session.post(f"{server.url}/abort_request", json={"rid": rid}) as response:
                assert response.status == 200

        tasks, aborts = [], []
        for number in range(NUM_REQUESTS):
            kind = rng.randrange(len(kinds))
            way = rng.choices(list(WAYS), list(WAYS.values()))[0]
            answer = Answer(kind, way, f"request {number}", None)
            delay = rng.uniform(0.02, 0.5)
            tasks.append(request(session, server.url, kinds[kind], answer, delay))
            if way == "abort":
                aborts.append(abort(answer.rid, delay + rng.uniform(0, 1.5)))
        answers, _ = await asyncio.gather(asyncio.gather(*tasks), asyncio.gather(*aborts))
        return answers


def resident_mib(server) -> float:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def test_of_five_hundred_requests_at_once_each_gets_its_own_answer(server):
    kinds = make_kinds()
    alone = [samples_of(server.post("/generate", body)) for body in kinds]
    assert len({str(samples) for samples in alone}) == NUM_KINDS
    before = resident_mib(server)
    answers = asyncio.run(storm(server, kinds))
    assert len({answer.rid for answer in answers}) == NUM_REQUESTS
    aborted = Counter()
    for answer in answers:
        if answer.samples is None:
            assert answer.way == "leave"
            continue
        for got, expected in zip(answer.samples, alone[answer.kind], strict=True):
            if got[2] == "abort":
                assert answer.way == "abort", f"{answer.rid} was aborted, and nobody asked"
                aborted[answer.rid] += 1
                got = (got[0], got[1], expected[2])
                expected = (expected[0][: len(got[0])], expected[1][: len(got[0])], expected[2])
            assert got == expected, f"{answer.rid} ({answer.way}) did not get what its prompt gets alone"
    assert aborted, "every request was through before its abort"
    server.wait_until(lambda load: load["num_running_reqs"] == load["num_queued_reqs"] == 0, "the engine is idle")
    assert server.load["num_used_tokens"] == 0, "pages of the cache were not given back"
    assert resident_mib(server) - before < GROWTH_MIB, "memory grew"
    assert [samples_of(server.post("/generate", body)) for body in kinds[:5]] == alone[:5]
