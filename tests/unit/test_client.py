"""The rollout client: what fails is aborted by its id, and only then repeated; a wait ends by progress, not length."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from colloid.errors import DeadlineExceeded, EngineError
from colloid.rollout.client import EngineClient, RequestAborted, RequestRefused
from tests.fake_engine import FakeEngine

PAYLOAD = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}}


def with_engine(body, engine, **options):
    async def run():
        async with engine.serve():
            options.setdefault("retry_delay", 0.01)
            client = EngineClient(engine.url, [engine.url], **options)
            try:
                return await body(client)
            finally:
                await client.close()

    return asyncio.run(run())


def failing(times, answer):
    """A reply that is `answer()` the first `times` times."""
    left = [times]

    def reply(payload):
        left[0] -= 1
        return answer() if left[0] >= 0 else [5, 6]

    return reply


def test_an_answer_comes_back_and_the_key_is_sent():
    engine = FakeEngine(lambda payload: [5, 6])
    answer = with_engine(lambda client: client.generate(PAYLOAD), engine, api_key="secret")
    assert answer["output_ids"] == [5, 6]
    assert engine.headers[0]["Authorization"] == "Bearer secret"


def test_a_broken_answer_is_aborted_and_then_sent_again_under_another_id():
    engine = FakeEngine(failing(1, lambda: web.Response(status=503, text="no worker")))
    answer = with_engine(lambda client: client.generate(PAYLOAD), engine)
    assert answer["output_ids"] == [5, 6]
    first, second = (request["rid"] for request in engine.requests)
    assert engine.aborts == [first] and first != second


def test_after_the_last_attempt_the_error_has_address_and_words():
    engine = FakeEngine(lambda payload: web.Response(status=500, text="out of luck"))
    with pytest.raises(EngineError, match="127.0.0.1.*for sample 7.*status 500: out of luck"):
        with_engine(lambda client: client.generate(PAYLOAD, name="sample 7"), engine)
    assert len(engine.requests) == 3 and len(engine.aborts) == 3


def test_a_refused_request_is_not_repeated():
    engine = FakeEngine(lambda payload: web.Response(status=400, text="top_p must be in (0, 1]"))
    with pytest.raises(RequestRefused, match="top_p must be"):
        with_engine(lambda client: client.generate(PAYLOAD), engine)
    assert len(engine.requests) == 1 and engine.aborts == []


def test_an_answer_that_is_not_json_is_an_engine_error():
    engine = FakeEngine(lambda payload: web.Response(text="<html>"))
    with pytest.raises(EngineError, match="not JSON"):
        with_engine(lambda client: client.generate(PAYLOAD), engine)


def test_an_unreachable_router_is_named():
    async def run():
        client = EngineClient("http://127.0.0.1:9", ["http://127.0.0.1:9"], retry_delay=0.01)
        try:
            await client.generate(PAYLOAD)
        finally:
            await client.close()

    with pytest.raises(EngineError, match="127.0.0.1:9.*no answer to its abort from http://127.0.0.1:9"):
        asyncio.run(run())


def test_a_silent_engine_ends_the_wait_with_names():
    engine = FakeEngine(lambda payload: [5], delay=lambda payload: 1000.0)
    with pytest.raises(DeadlineExceeded, match=r"no progress|no engine made progress.*sample 7.*127.0.0.1"):
        with_engine(
            lambda client: client.generate(PAYLOAD, name="sample 7"), engine, progress_deadline=0.3, max_attempts=2
        )
    assert sorted(engine.aborts) == sorted(request["rid"] for request in engine.requests)
    assert len(engine.requests) == 2


def test_a_long_response_is_waited_for_as_long_as_tokens_come():
    engine = FakeEngine(lambda payload: [5], delay=lambda payload: 5.0)

    async def body(client):
        async def tokens():
            while True:
                engine.generation_tokens_total += 1
                await asyncio.sleep(0.02)

        ticking = asyncio.ensure_future(tokens())
        try:
            return await client.generate(PAYLOAD)
        finally:
            ticking.cancel()

    assert with_engine(body, engine, progress_deadline=2.0)["output_ids"] == [5]
    assert len(engine.requests) == 1 and not engine.aborts


def test_completions_of_others_are_progress():
    engine = FakeEngine(lambda payload: [5], delay=lambda payload: 5.0 if payload["input_ids"] == [9] else 0.05)

    async def body(client):
        async def stream():
            while True:
                await client.generate(PAYLOAD)

        others = asyncio.ensure_future(stream())
        try:
            return await client.generate({**PAYLOAD, "input_ids": [9]})
        finally:
            others.cancel()

    assert with_engine(body, engine, progress_deadline=2.0)["output_ids"] == [5]


def test_an_aborted_scope_returns_what_there_is_and_takes_no_more():
    engine = FakeEngine(lambda payload: [5, 6, 7], delay=lambda payload: 1000.0)

    async def body(client):
        with client.scope() as scope:
            running = [asyncio.ensure_future(client.generate(PAYLOAD)) for _ in range(5)]
            while len(engine.running) < 5:
                await asyncio.sleep(0.01)
            assert await client.abort(scope) == []
            answers = await asyncio.gather(*running)
            assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}
            with pytest.raises(RequestAborted):
                await client.generate(PAYLOAD)
        return len(engine.requests)

    assert with_engine(body, engine) == 5


def test_a_cancelled_request_is_aborted_at_the_engine():
    engine = FakeEngine(lambda payload: [5], delay=lambda payload: 1000.0)

    async def body(client):
        task = asyncio.ensure_future(client.generate(PAYLOAD))
        while not engine.running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return engine.aborts, [request["rid"] for request in engine.requests]

    aborts, rids = with_engine(body, engine)
    assert aborts == rids


def test_requests_in_flight_are_bounded():
    engine = FakeEngine(lambda payload: [5], delay=lambda payload: 0.02)

    async def body(client):
        await asyncio.gather(*(client.generate(PAYLOAD) for _ in range(30)))

    with_engine(body, engine, max_connections=4)
    assert engine.max_running <= 4 and len(engine.requests) == 30


def test_a_dead_engine_does_not_hold_up_the_abort_at_the_others():
    engine = FakeEngine(lambda payload: [5], delay=lambda payload: 1000.0)

    async def body(client):
        client.engine_urls.append("http://127.0.0.1:9")
        started = time.monotonic()
        with client.scope() as scope:
            running = asyncio.ensure_future(client.generate(PAYLOAD))
            while not engine.running:
                await asyncio.sleep(0.01)
            assert await client.abort(scope) == ["http://127.0.0.1:9"]
            await running
        return time.monotonic() - started

    assert with_engine(body, engine) < 30
