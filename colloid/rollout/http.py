"""JSON over HTTP, asynchronously: what fails is an `EngineError` that names the address, what is refused says why."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson

from colloid.errors import EngineError

RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)


class RequestRefused(EngineError):
    """The engine understood the request and will not do it (status 4xx): sending it again is of no use."""


class Http:
    """Used from one event loop.

    Args:
        api_key: sent as a bearer token where given.
        proxy: that requests go through, http://…; None: none, whatever the environment says.
    """

    def __init__(self, api_key: str | None = None, proxy: str | None = None):
        self._proxy = proxy
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        url: str,
        payload: Any,
        *,
        name: str = "",
        timeout: float | None = None,
        is_json: bool = True,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """The JSON answer, or its text.

        Args:
            name: of what it is for (a sample), for errors.
            timeout: seconds for all of it; None: none but that for the connection.

        Raises:
            RequestRefused: status 4xx, with the server's words.
            EngineError: unreachable, broken, or not JSON.
        """
        what = f"{method} {url}" + (f" for {name}" if name else "")
        try:
            async with self._open_session().request(
                method,
                url,
                data=None if payload is None else orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY),
                headers=self._headers | {"Content-Type": "application/json"} | (headers or {}),
                timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=30),
                proxy=self._proxy,
            ) as answer:
                body = await answer.read()
                if answer.status >= 400:
                    words = body.decode("utf-8", "replace")[:2000]
                    kind = EngineError if answer.status in RETRIED_STATUS else RequestRefused
                    raise kind(f"{what}: status {answer.status}: {words}")
                if not is_json:
                    return body.decode("utf-8", "replace")
                return orjson.loads(body) if body.strip() else {}
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{what}: the answer is not JSON: {body[:200]!r}") from error
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise EngineError(f"{what}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        return self._session
