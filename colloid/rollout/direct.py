"""Which engine a request goes to that the router cannot pass on.

sglang-router writes requests anew from the fields that it knows, and drops `return_routed_experts`
(https://github.com/sgl-project/sglang/issues/20696) and what the embedded engine has beyond SGLang. Such requests go to
an engine directly: to the one that has the same prompt already, so that its cache is shared, unless that one is too
busy; else to the one with the fewest requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

DROPPED_BY_ROUTER = ("return_routed_experts", "input_logprob_temperature")
SLACK = 16
"""Requests that an engine may have beyond twice those of the idlest one before a prompt that it has goes elsewhere."""


class DirectRequests:
    """Those in flight at each engine.

    Args:
        router_url: where all other requests go.
    """

    def __init__(self, router_url: str, engine_urls: Sequence[str]):
        self._router_url = router_url
        self._load = dict.fromkeys(engine_urls, 0)
        self._prompts: dict[Any, Counter[str]] = {}

    def set_engines(self, router_url: str, engine_urls: Sequence[str]) -> None:
        """The engines are others from now on."""
        self._router_url = router_url
        self._load = {url: self._load.get(url, 0) for url in engine_urls}

    @contextmanager
    def target(self, payload: dict[str, Any]) -> Iterator[str]:
        """The server that is sent this request, which is in flight while it is open."""
        if not self._load or not any(payload.get(name) for name in DROPPED_BY_ROUTER):
            yield self._router_url
            return
        ids = payload.get("input_ids")
        prompt = payload.get("text") if ids is None else tuple(ids)
        places = self._prompts.setdefault(prompt, Counter())
        url = self._choose(places)
        self._load[url] += 1
        places[url] += 1
        try:
            yield url
        finally:
            if self._load.get(url):  # it may have left, or have come back since
                self._load[url] -= 1
            places[url] -= 1
            if not places.total():
                self._prompts.pop(prompt, None)

    def _choose(self, places: Counter[str]) -> str:
        idlest = min(self._load, key=self._load.__getitem__)
        limit = 2 * self._load[idlest] + SLACK
        have = [url for url, count in places.items() if count and self._load.get(url, limit) < limit]
        return min(have, key=self._load.__getitem__) if have else idlest
