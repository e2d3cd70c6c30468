"""The HTTP server of sessions: OpenAI's chat completions and Anthropic's messages, one key an episode.

It runs in the event loop of the rollout manager, which waits for engines most of its time. Agents must not block that
loop: they are asynchronous, or run in a thread or a process (`Session.run`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import orjson
from aiohttp import web

from colloid.agents import anthropic, openai
from colloid.agents.chat import RequestError
from colloid.agents.sessions import Session

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MODEL = "policy"
"""The one model of `/v1/models`. Requests may name any."""
MAX_BODY = 2**28
"""Bytes of a request."""


class AgentEndpoint:
    """Serves the open sessions.

    Args:
        host: the address that it listens at, and that sessions are told.
    """

    def __init__(self, host: str = LOOPBACK):
        self._host = host
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}
        self._opened = 0
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._url = ""

    async def start(self) -> None:
        """Starts to listen at a free port, unless it does already.

        Raises:
            OSError: the address cannot be listened at.
        """
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MAX_BODY)
            app.router.add_post("/v1/chat/completions", _handler(self._answer, openai))
            app.router.add_post("/v1/messages", _handler(self._answer, anthropic))
            app.router.add_get("/v1/models", _handler(self._models, openai))
            app.router.add_get("/v1/models/{name:.+}", _handler(self._model, openai))
            app.router.add_route("*", "/{path:.*}", _handler(_unknown, openai))
            # A client that has gone (or has sent its request again) ends its request here, and so at the engine.
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, self._host, 0).start()
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._url = f"http://{host}:{runner.addresses[0][1]}"
            self._runner = runner
            logger.info("agents are served at %s", self._url)

    async def close(self) -> None:
        """Ends all sessions, and listens no more."""
        for session in list(self._sessions.values()):
            await session.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def serving(self, session: Session) -> Iterator[None]:
        """Inside, the session has an address and a key, and is served."""
        number, self._opened = self._opened, self._opened + 1
        session.api_key = f"sk-{number}-{self._sign(str(number))}"
        session.anthropic_base_url, session.base_url = self._url, f"{self._url}/v1"
        self._sessions[session.api_key] = session
        try:
            yield
        finally:
            del self._sessions[session.api_key]

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:40]

    def _session_of(self, request: web.Request) -> Session:
        """The session that a request's key opens.

        Raises:
            RequestError: there is no key, a wrong one, or that of a session that has ended.
        """
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if key in self._sessions:
            return self._sessions[key]
        number, _, signature = key.removeprefix("sk-").partition("-")
        if signature and hmac.compare_digest(signature.encode(), self._sign(number).encode()):
            message = "this session has ended; its key opens nothing any more"
            raise RequestError(message, status=410, code="session_ended")
        what = "Incorrect API key provided" if key else "No API key provided"
        raise RequestError(f"{what}: each session has its own", status=401, code="invalid_api_key")

    async def _answer(self, request: web.Request, api: ModuleType) -> web.StreamResponse:
        session = self._session_of(request)
        chat = api.read_request(await _body(request))
        answer = await session.complete(chat)
        if not chat.stream:
            return web.json_response(api.completion(answer, chat), dumps=_dumps)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for event in api.stream(answer, chat):
            await response.write(event)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request, api: ModuleType) -> web.Response:
        self._session_of(request)
        return web.json_response({"object": "list", "data": [_model_entry(MODEL)]})

    async def _model(self, request: web.Request, api: ModuleType) -> web.Response:
        self._session_of(request)
        return web.json_response(_model_entry(request.match_info["name"]))


def _handler(
    serve: Callable[[web.Request, ModuleType], Awaitable[web.StreamResponse]], api: ModuleType
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler, whose errors have the API's shape. Clients are told not to try them again: nothing would change."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await serve(request, api)
        except RequestError as error:
            headers = {"x-should-retry": "false"}
            return web.json_response(api.error_body(error), status=error.status, headers=headers, dumps=_dumps)

    return handle


async def _unknown(request: web.Request, api: ModuleType) -> web.StreamResponse:
    raise RequestError(f"there is no {request.method} {request.path} here", status=404, code="unknown_url")


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be an object, not {type(body).__name__}")
    return body


def _model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "colloid"}


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
