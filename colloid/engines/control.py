"""Control calls to one engine (or to the router): pause, weights, abort, checksums, registration.

They do not pass through the router, are made one at a time, and each has a deadline. Generation has its own
asynchronous client in `colloid.rollout.client`.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from colloid.errors import EngineError


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine serves."""

    url: str
    """`http://host:port`, without a path."""
    kind: str = "embedded"
    """`embedded` or `sglang`: they take weights in different ways."""
    name: str = ""
    """Among those of the run: a replacement has another one, whatever its address."""


class EngineControl:
    """A synchronous JSON client for one server.

    Args:
        url: `http://host:port`.
        api_key: sent as a bearer token where given.
        timeout: seconds that one call may take.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 60.0):
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> dict[str, Any]:
        """The JSON answer to GET `path` (an empty dict where the body is empty or not JSON)."""
        return self._call("GET", path, None)

    def text(self, path: str) -> str:
        """The answer to GET `path` as it is; raises as `post`."""
        return self._answer("GET", path, None)

    def post(self, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer to POST `path`.

        Raises:
            EngineError: no answer within the deadline, or a status of 400 and above; with the server's words.
        """
        return self._call("POST", path, json.dumps(payload or {}))

    def delete(self, path: str) -> dict[str, Any]:
        """The JSON answer to DELETE `path`; raises as `post`."""
        return self._call("DELETE", path, None)

    def _call(self, method: str, path: str, body: str | None) -> dict[str, Any]:
        text = self._answer(method, path, body)
        try:
            data = json.loads(text) if text else {}
        except json.JSONDecodeError:
            return {}
        return data if isinstance(data, dict) else {"data": data}

    def _answer(self, method: str, path: str, body: str | None) -> str:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout)
        try:
            connection.request(method, path, body=body, headers=self._headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            reason = (
                f"no answer in {self.timeout:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
            )
            raise EngineError(f"{method} {self.url}{path}: {reason}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise EngineError(f"{method} {self.url}{path}: status {answer.status}: {text[:2000]}")
        return text
