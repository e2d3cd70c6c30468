"""Control calls to one engine (or to the router): pause, weights, abort, checksums, registration.

They do not pass through the router, are made one at a time, and each has a deadline. Generation has its own
asynchronous client in `colloid.rollout.client`.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from colloid.errors import EngineError

LONGEST_IDLE = 1.0
"""Seconds after which a kept connection is not used again: servers close idle ones, SGLang's after five."""


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine serves."""

    url: str
    """`http://host:port`, without a path."""
    kind: str = "embedded"
    """`embedded` or `sglang`: they take weights in different ways."""
    name: str = ""
    """Among those of the run: a replacement has another one, whatever its address."""

    def is_named_in(self, words: str) -> bool:
        """Whether an error speaks of it: its address is there, and no longer one that begins so."""
        return re.search(re.escape(self.url) + r"(?!\d)", words) is not None


class EngineControl:
    """A synchronous JSON client for one server.

    Args:
        url: `http://host:port`.
        api_key: sent as a bearer token where given.
        timeout: seconds that one call may take.
        name: that of an `EngineAddress`.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 60.0, name: str = ""):
        self.url = url.rstrip("/")
        self.name = name
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._keeps = False
        self._kept: list[tuple[float, http.client.HTTPConnection]] = []  # with the time since when each is idle

    def keep_connections(self) -> None:
        """From here to `close` calls take the connection of a call before: for many calls one after another."""
        self._keeps = True

    def close(self) -> None:
        """Closes what `keep_connections` has kept; further calls have connections of their own."""
        self._keeps = False
        while self._kept:
            self._kept.pop()[1].close()

    def get(self, path: str) -> dict[str, Any]:
        """The JSON answer to GET `path` (an empty dict where the body is empty or not JSON)."""
        return self._call("GET", path, None)

    def text(self, path: str) -> str:
        """The answer to GET `path` as it is; raises as `post`."""
        return self._answer("GET", path, None)

    def post(self, path: str, payload: dict[str, Any] | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """The JSON answer to POST `path`; within `timeout` seconds where given.

        Raises:
            EngineError: no answer within the deadline, or a status of 400 and above; with the server's words.
        """
        return self._call("POST", path, json.dumps(payload or {}), timeout)

    def delete(self, path: str) -> dict[str, Any]:
        """The JSON answer to DELETE `path`; raises as `post`."""
        return self._call("DELETE", path, None)

    def _call(self, method: str, path: str, body: str | None, timeout: float | None = None) -> dict[str, Any]:
        text = self._answer(method, path, body, timeout)
        try:
            data = json.loads(text) if text else {}
        except json.JSONDecodeError:
            return {}
        return data if isinstance(data, dict) else {"data": data}

    def _answer(self, method: str, path: str, body: str | None, timeout: float | None = None) -> str:
        timeout = self.timeout if timeout is None else timeout
        connection = self._connection(timeout)
        try:
            connection.request(method, path, body=body, headers=self._headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            reason = f"no answer in {timeout:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
            connection.close()
            raise EngineError(f"{method} {self.url}{path}: {reason}") from error
        if self._keeps and connection.sock is not None:
            self._kept.append((time.monotonic(), connection))
        else:
            connection.close()
        if answer.status >= 400:
            raise EngineError(f"{method} {self.url}{path}: status {answer.status}: {text[:2000]}")
        return text

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        while self._kept:
            idle_since, connection = self._kept.pop()
            if time.monotonic() - idle_since < LONGEST_IDLE:
                connection.sock.settimeout(timeout)
                return connection
            connection.close()
        parts = urlsplit(self.url)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
