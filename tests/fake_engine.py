"""An engine's HTTP contract without a model, in the test's own event loop. It answers by a function of the request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.serving import serving


class FakeEngine:
    """Serves /generate, /abort_request and /metrics.

    Attributes:
        reply: (payload) -> response ids, or an `aiohttp.web.Response` to send in their place.
        delay: (payload) -> seconds before the answer; an abort ends them.
        more: (payload, response ids) -> what else is in the answer's `meta_info`.
    """

    def __init__(self, reply: Callable[[dict], Any], delay: Callable[[dict], float] = lambda payload: 0.0):
        self.reply = reply
        self.delay = delay
        self.more: Callable[[dict, list[int]], dict] = lambda payload, ids: {}
        self.weight_version = "3"
        self.requests: list[dict] = []
        self.aborts: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.max_running = 0
        self.generation_tokens_total = 0
        self.headers: list[dict] = []
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeEngine]:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/metrics", self._metrics)
        async with serving(app) as self.url:
            yield self

    async def _generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        rid = payload["rid"]
        assert rid not in self.running, "the same request runs twice"
        self.running[rid] = asyncio.Event()
        self.max_running = max(self.max_running, len(self.running))
        try:
            aborted = await self._wait(self.running[rid], self.delay(payload))
        finally:
            del self.running[rid]
        reply = self.reply(payload)
        if isinstance(reply, web.Response):
            return reply
        ids = reply[:1] if aborted else reply
        limit = payload["sampling_params"]["max_new_tokens"]
        finish = {"type": "abort"} if aborted else {"type": "stop", "matched": ids[-1]} if len(ids) < limit else None
        ids = ids[:limit]
        self.generation_tokens_total += len(ids)
        meta = {
            "id": rid,
            "finish_reason": finish or {"type": "length", "length": limit},
            "weight_version": self.weight_version,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.25 - (token % 7) / 8, token, None] for token in ids],
        } | self.more(payload, ids)
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        if rid in self.running:
            self.running[rid].set()
        return web.json_response({})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'sglang:realtime_tokens_total{{mode="decode"}} {self.generation_tokens_total}\n')

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> bool:
        try:
            await asyncio.wait_for(event.wait(), seconds) if seconds else await asyncio.sleep(0)
        except asyncio.TimeoutError:
            return False
        return event.is_set()


def seeded(payload: dict, modulus: int) -> int:
    """A number that follows from prompt and sampling seed."""
    text = f"{payload['input_ids']}/{payload['sampling_params'].get('sampling_seed')}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % modulus
