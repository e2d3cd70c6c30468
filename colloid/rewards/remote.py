"""`remote_rm`: a reward server that takes one sample as JSON and answers with its reward.

POST `--rm-url` with `{"prompt", "response", "label", "metadata"}`; the answer is a number, or an object with numbers
(`--reward-key` picks one; without it `score`).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from colloid.rewards.pool import GradingFailed

MAX_CONCURRENT = 64
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds before a repeat: doubled each time."""
_RETRIED = (408, 425, 429)


@dataclass
class RemoteReward:
    """The client of one reward server. Used from one event loop.

    Attributes:
        deadline: seconds for one sample, repeats and pauses included.
        attempt_timeout: seconds for one request.
        proxy: that requests go through, http://…; None: none, whatever the environment says.
    """

    url: str
    deadline: float = 180.0
    attempt_timeout: float = 60.0
    proxy: str | None = None

    def __post_init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(MAX_CONCURRENT)
        self._asking = 0
        self._last_answer = 0.0

    async def reward(self, prompt: Any, response: str, label: Any, metadata: dict[str, Any]) -> Any:
        """A number or a dict, as the server answers.

        Raises:
            GradingFailed: no answer within the deadline, or one that is no reward; says which.
        """
        payload = {"prompt": prompt, "response": response, "label": label, "metadata": metadata}
        clock = asyncio.get_running_loop().time
        self._last_answer = self._last_answer if self._asking else clock()
        self._asking += 1
        try:
            await self._wait_for_place()
            try:
                reward = await asyncio.wait_for(self._repeated(payload), self.deadline)
                self._last_answer = clock()
                return reward
            finally:
                self._places.release()
        except asyncio.TimeoutError:
            raise GradingFailed(f"--rm-url {self.url} did not answer within {self.deadline:g} s") from None
        finally:
            self._asking -= 1

    async def close(self) -> None:
        """Ends the connections."""
        if self._session is not None:
            await self._session.close()

    async def _wait_for_place(self) -> None:
        """Raises TimeoutError where the server has answered nobody for as long as the deadline."""
        clock = asyncio.get_running_loop().time
        while True:
            left = self._last_answer + self.deadline - clock()
            try:
                await asyncio.wait_for(self._places.acquire(), max(left, 0.001))
                return
            except asyncio.TimeoutError:
                if clock() >= self._last_answer + self.deadline:
                    raise

    async def _repeated(self, payload: dict[str, Any]) -> Any:
        clock = asyncio.get_running_loop().time
        end, pause = clock() + self.deadline, FIRST_PAUSE
        while True:
            try:
                return await self._once(payload)
            except (aiohttp.ClientConnectionError, asyncio.TimeoutError, _TryAgain) as error:
                wait = pause * (1 + random.random())
                if clock() + wait >= end:
                    reason = str(error) or f"no answer within {self.attempt_timeout:g} s"
                    raise GradingFailed(f"--rm-url {self.url} failed for {self.deadline:g} s: {reason}") from error
                await asyncio.sleep(wait)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _once(self, payload: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=self.attempt_timeout)
        async with self._session.post(self.url, json=payload, timeout=timeout, proxy=self.proxy) as answer:
            text = await answer.text()
            if answer.status >= 500 or answer.status in _RETRIED:
                raise _TryAgain(f"status {answer.status}: {text[:200]}")
            if answer.status != 200:
                raise GradingFailed(f"--rm-url {self.url} answered with status {answer.status}: {text[:200]}")
            try:
                return await answer.json(content_type=None)
            except ValueError as error:
                raise GradingFailed(f"--rm-url {self.url} did not answer with JSON: {text[:200]!r}") from error


class _TryAgain(Exception):
    """The server says that it cannot answer now."""
