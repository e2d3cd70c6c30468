"""A client whose engines come and go: what it sends where, what counts as an attempt, and who waits for whom."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from colloid.engines.control import EngineAddress
from colloid.engines.members import PoolView
from colloid.errors import DeadlineExceeded, EngineError
from colloid.rollout.client import MAX_EXCUSED, EngineClient
from colloid.rollout.serving import Slots
from tests.fake_engine import FakeEngine
from tests.virtual_time import VirtualTimeLoop

PAYLOAD = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}}


def view(engine: FakeEngine, *, serving: bool = True, **more) -> PoolView:
    """One engine, which stands for the router as well."""
    return PoolView((EngineAddress(engine.url),) if serving else (), router_url=engine.url, **more)


def with_engine(body, engine, **options):
    async def run():
        async with engine.serve():
            client = EngineClient(engine.url, [engine.url], retry_delay=0.01, **options)
            try:
                return await asyncio.wait_for(body(client), 30)
            finally:
                await client.close()

    return asyncio.run(run())


def breaking(times: int) -> FakeEngine:
    left = [times]

    def reply(payload):
        left[0] -= 1
        return web.Response(status=500, text="gone") if left[0] >= 0 else [5, 6]

    return FakeEngine(reply)


def test_failures_for_which_an_engine_was_lost_are_no_attempts_but_not_forever():
    async def body(client, engine):
        async def examine():
            losses[0] += 1
            client.engines_changed(view(engine, losses=losses[0]), 8)

        losses = [0]
        client._examine = examine
        return await client.generate(PAYLOAD)

    engine = breaking(MAX_EXCUSED + 2)
    answer = with_engine(lambda client: body(client, engine), engine, max_attempts=3)
    assert answer["output_ids"] == [5, 6] and len(engine.requests) == MAX_EXCUSED + 3
    engine = breaking(1000)
    with pytest.raises(EngineError, match="gone"):
        with_engine(lambda client: body(client, engine), engine, max_attempts=3)
    assert len(engine.requests) == MAX_EXCUSED + 3


def test_where_nobody_was_lost_an_attempt_is_an_attempt():
    engine, looks = breaking(1000), []

    async def examine():
        looks.append(1)

    with pytest.raises(EngineError, match="gone"):
        with_engine(lambda client: client.generate(PAYLOAD), engine, examine=examine)
    assert len(engine.requests) == len(looks) == 3


@pytest.mark.parametrize("why", [{"serving": False}, {"router_up": False}], ids=["no engine", "no router"])
def test_requests_wait_until_an_engine_serves_behind_a_router(why):
    engine = FakeEngine(lambda payload: [5])

    async def body(client):
        client.engines_changed(view(engine, **why), 8)
        waiting = asyncio.ensure_future(client.generate(PAYLOAD))
        await asyncio.sleep(0.1)
        assert not engine.requests and not waiting.done()
        client.engines_changed(view(engine), 8)
        return await waiting

    assert with_engine(body, engine)["output_ids"] == [5]


def test_they_do_not_wait_forever():
    engine = FakeEngine(lambda payload: [5])

    async def body(client):
        client.engines_changed(view(engine, serving=False), 8)
        await client.generate(PAYLOAD)

    with pytest.raises(DeadlineExceeded, match="no engine serves for 0.1 s"):
        with_engine(body, engine, no_engine_deadline=0.1)


def test_what_may_be_at_an_engine_that_never_answers_is_sent_again():
    engine = FakeEngine(lambda payload: [5], delay=lambda payload: 1000.0 if len(engine.requests) == 1 else 0.0)

    async def body(client):
        sent = asyncio.ensure_future(client.generate(PAYLOAD))
        while not engine.running:
            await asyncio.sleep(0.01)
        client.engines_changed(view(engine, losses=1, cuts=1), 8)
        return await sent

    assert with_engine(body, engine, max_attempts=1)["output_ids"] == [5]
    first, second = (request["rid"] for request in engine.requests)
    assert engine.aborts == [first] != [second]


def test_requests_at_an_engine_that_is_to_leave_are_aborted_there_and_sent_again():
    engine = FakeEngine(lambda payload: [5], delay=lambda payload: 1000.0 if len(engine.requests) == 1 else 0.0)

    async def body(client):
        sent = asyncio.ensure_future(client.generate(PAYLOAD))
        while not engine.running:
            await asyncio.sleep(0.01)
        client.engines_changed(view(engine, losses=1, expelled=frozenset({engine.url})), 8)
        return await sent

    answer = with_engine(body, engine, max_attempts=1)
    assert answer["meta_info"]["finish_reason"]["type"] != "abort" and len(engine.requests) == 2


@pytest.mark.parametrize(
    "garbage", [b"[1, 2]", b'{"text": ""}', b'{"meta_info": 7}', b'{"meta_info": {}, "output_ids": "abc"}']
)
def test_an_answer_of_another_form_is_a_failed_attempt(garbage):
    engine = FakeEngine(lambda payload: web.Response(body=garbage) if len(engine.requests) == 1 else [5])

    async def body(client):
        return (await client.generate(PAYLOAD))["output_ids"], client.failed_requests

    assert with_engine(body, engine) == ([5], 1)


def test_places_for_requests_follow_the_number_of_engines_and_are_given_in_order():
    async def run():
        slots, running, most, order = Slots(2), set(), [], []

        async def work(number):
            async with slots:
                running.add(number)
                order.append(number)
                most.append(len(running))
                await asyncio.sleep(1.0)
                running.discard(number)

        tasks = [asyncio.ensure_future(work(number)) for number in range(12)]
        await asyncio.sleep(0.5)
        tasks[5].cancel()
        assert max(most) == 2
        slots.resize(5)
        await asyncio.sleep(0.1)
        assert len(running) == 5
        slots.resize(1)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [number for number in range(12) if number != 5] and most[-3:] == [1, 1, 1]
        async with slots:
            pass

    loop = VirtualTimeLoop()
    loop.run_until_complete(run())
    loop.close()
