"""An `EngineClient` without engines, in virtual time. What it samples is known token by token.

The token of a sample at a position of its response is `token_at(sample, position)`, so that a token that is lost, comes
twice or stands in the wrong place shows. All else (lengths, latencies, failures) follows from the seed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import xxhash

from colloid.errors import EngineError
from colloid.rollout.client import EngineClient, RequestAborted, RequestRefused
from colloid.rollout.scopes import RequestScope, note_cut

PROMPT_LENGTH = 2
TOKENS = 1000
"""More than any response has."""


def token_at(sample: int, position: int) -> int:
    return 10 + sample * TOKENS + position


def log_prob_of(token: int) -> float:
    return -1.0 / (3.0 + token)


def draw(*what: int) -> float:
    """0 <= x < 1, by chance, but always the same for the same numbers."""
    return xxhash.xxh3_64_intdigest(repr(what).encode()) / 2**64


class FakeClient:
    """
    Args:
        seed: of everything that happens.
        max_length: responses want to be 1 to that long.
        fail, refuse, stick: shares of requests that break, that are refused, and that no abort reaches.
    """

    last_progress = 0.0
    router_url = "http://fake"
    scope = EngineClient.scope

    def __init__(self, seed: int, *, max_length: int = 12, fail=0.0, refuse=0.0, stick=0.0):
        self.seed, self.max_length = seed, max_length
        self.fail, self.refuse, self.stick = fail, refuse, stick
        self.weight_version = 0
        self.current: RequestScope | None = None
        self.waiting: set[asyncio.Future] = set()
        self.generated: dict[tuple[int, int], list[int]] = {}
        """(sample, position) -> the weight version of each time that the token was handed out."""
        self.budgets: list[tuple[int, int]] = []

    def begin(self, scope: RequestScope) -> None:
        self.current = scope

    def length_of(self, sample: int) -> int:
        """The tokens that the sample's response has where nothing limits it."""
        return 1 + int(draw(self.seed, sample, 1) * self.max_length)

    async def generate(
        self, payload: dict[str, Any], *, name: str = "", session: str = "", resumable: bool = False
    ) -> dict[str, Any]:
        if self.current.aborted:
            raise RequestAborted(name)
        ids, limit = payload["input_ids"], payload["sampling_params"]["max_new_tokens"]
        sample = int(name.rpartition(" ")[2]) if name else (ids[PROMPT_LENGTH - 1])
        request = self.seed, payload["sampling_params"]["sampling_seed"], len(ids)
        pace, fate = draw(*request, 2) ** 3 * 3.0, draw(*request, 3)
        start = len(ids) - PROMPT_LENGTH
        self.budgets.append((start, limit))
        count = max(0, min(self.length_of(sample) - start, limit))
        stuck = fate < self.stick
        began = asyncio.get_running_loop().time()
        if stuck:
            await asyncio.sleep(500.0)
        else:
            await self._wait(pace * count)
        if fate > 1 - self.fail:
            raise EngineError(f"engine gone under sample {sample}")
        if fate > 1 - self.fail - self.refuse:
            raise RequestRefused(f"refused: sample {sample}")
        cut = self.current.aborted
        if cut:
            passed = asyncio.get_running_loop().time() - began
            count = min(count, int(passed / pace) if pace else count)
        tokens = [token_at(sample, start + k) for k in range(count)]
        for k in range(count):
            self.generated.setdefault((sample, start + k), []).append(self.weight_version)
        ended = start + count >= self.length_of(sample)
        finish = "abort" if cut else "stop" if ended else "length"
        if cut:
            note_cut(name)
        return {
            "output_ids": tokens,
            "text": "",
            "meta_info": {
                "finish_reason": {"type": finish},
                "weight_version": str(self.weight_version),
                "output_token_logprobs": [[log_prob_of(token), token, None] for token in tokens],
            },
        }

    async def abort(self, scope: RequestScope) -> list[str]:
        scope.aborted = True
        for waiting in self.waiting:
            _wake(waiting)
        return []

    async def _wait(self, seconds: float) -> None:
        """Until then, or the abort."""
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        timer = loop.call_later(seconds, _wake, waiting)
        self.waiting.add(waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            self.waiting.discard(waiting)


def _wake(waiting: asyncio.Future) -> None:
    if not waiting.done():
        waiting.set_result(None)
