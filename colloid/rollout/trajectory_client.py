"""The client of a server that makes rollouts outside of the run (`--rollout-buffer-url`), in the protocol of slime's
rollout buffer:

    POST /start_rollout     what to generate, and with which engines; once a run
    POST /get_rollout_data  {"success": bool, "data": {"data": [item, ...], "meta_info": {...}}}: what is finished; it
                            is handed out once

An item is a trajectory: `instance_id` (whose prompt; those of one prompt are a group), `messages`, `reward`, and
`extra_info`, whose `finish_reason` "length" says that it was cut off.

Groups that were fetched and not trained wait here. They are lost with the process: the server is told at the start
which groups were trained (`skip_instance_ids`), and makes the others anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from colloid.errors import DeadlineExceeded, EngineError, HookError
from colloid.rollout.http import Http, RequestRefused

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds before the server is asked again; doubled each time that it has nothing."""
REQUEST_TIMEOUT = 120.0
NOTHING_NEW = 1800.0
"""Seconds without a new trajectory after which the server is given up."""
REPORT_EVERY = 60.0


@dataclass
class Trajectory:
    """One graded conversation."""

    instance_id: Any
    messages: list[dict[str, Any]]
    reward: Any
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def truncated(self) -> bool:
        """Whether a length limit ended it."""
        return self.extra.get("finish_reason") == "length"


class TrajectoryServer:
    """Used from one event loop.

    Args:
        url: of the server.
        retries: failed requests, one after another, after which it is given up; -1: only `nothing_new` counts.
        proxy: through which it is asked.
        nothing_new: seconds.
    """

    def __init__(self, url: str, *, retries: int = -1, proxy: str | None = None, nothing_new: float = NOTHING_NEW):
        self.url = url.rstrip("/")
        self._retries, self._nothing_new = retries, nothing_new
        self._http = Http(proxy=proxy)
        self._started = False
        self._waiting: list[list[Trajectory]] = []

    async def start(self, payload: dict[str, Any]) -> None:
        """Has the server begin; later calls do nothing.

        Raises:
            DeadlineExceeded: see `take`.
        """
        if not self._started:
            await self._asked("start_rollout", payload, self._give_up_at())
            self._started = True

    async def take(self, count: int, at_least: int) -> tuple[list[list[Trajectory]], dict[str, float]]:
        """`count` groups, those that were finished first, and what the server tells of all that it made meanwhile.

        Args:
            at_least: groups that are enough where the server is given up.

        Raises:
            DeadlineExceeded: it was, with fewer. Says why.
            HookError: it answers with something else than trajectories.
        """
        pause, give_up, told = FIRST_PAUSE, self._give_up_at(), _Told()
        report = time.monotonic() + REPORT_EVERY
        while len(self._waiting) < count:
            try:
                answer = await self._asked("get_rollout_data", {}, give_up)
            except DeadlineExceeded as error:
                if len(self._waiting) < at_least:
                    raise DeadlineExceeded(f"{error}; {len(self._waiting)} of {count} groups are there") from error
                logger.warning("%s; the rollout has %d groups of %d", error, len(self._waiting), count)
                break
            groups = _groups(answer, self.url, told)
            self._waiting += groups
            if groups:
                pause, give_up = FIRST_PAUSE, self._give_up_at()
            elif time.monotonic() >= give_up:
                give_up = float("-inf")  # what is there is taken, or the next question says that it is too late
            if time.monotonic() >= report:
                report += REPORT_EVERY
                logger.info("%s has made %d of %d groups", self.url, len(self._waiting), count)
            if len(self._waiting) < count:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken, told.metrics()

    async def close(self) -> None:
        """Ends the connection."""
        await self._http.close()

    def _give_up_at(self) -> float:
        return time.monotonic() + self._nothing_new

    async def _asked(self, endpoint: str, payload: dict[str, Any], give_up: float) -> dict[str, Any]:
        """The answer; asked again after a failure.

        Raises:
            DeadlineExceeded: too many failures, or it is too late.
        """
        failures, pause = 0, FIRST_PAUSE
        where = f"POST {self.url}/{endpoint}"
        while time.monotonic() < give_up:
            try:
                return await self._http.request("POST", f"{self.url}/{endpoint}", payload, timeout=REQUEST_TIMEOUT)
            except RequestRefused as error:
                raise HookError(f"--rollout-buffer-url {self.url} is no rollout buffer: {error}") from error
            except EngineError as error:
                failures += 1
                if failures > self._retries >= 0:
                    raise DeadlineExceeded(f"{where} failed {failures} times: {error}") from error
                logger.warning("%s failed, and is tried again: %s", where, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise DeadlineExceeded(f"{where}: no new trajectory in {self._nothing_new:.0f} s")


class _Told:
    """What the server says of everything that it made, those included that it does not hand out."""

    def __init__(self) -> None:
        self._samples, self._rewards = 0.0, 0.0

    def add(self, meta: dict[str, Any]) -> None:
        samples = float(meta.get("total_samples") or 0)
        self._samples += samples
        self._rewards += samples * float(meta.get("avg_reward") or 0)

    def metrics(self) -> dict[str, float]:
        if not self._samples:
            return {}
        mean = self._rewards / self._samples
        return {"rollout/no_filter/total_samples": self._samples, "rollout/no_filter/avg_reward": mean}


def _groups(answer: Any, url: str, told: _Told) -> list[list[Trajectory]]:
    """The trajectories of an answer by prompt, in the order of the first of each."""
    if not isinstance(answer, dict) or "success" not in answer:
        raise HookError(f"{url}/get_rollout_data must answer with `success` and `data`, not {str(answer)[:200]}")
    data = answer.get("data") or {}
    items = data.get("data") or [] if isinstance(data, dict) else [_inner(item) for item in data]
    told.add(data.get("meta_info") or {} if isinstance(data, dict) else {})
    groups: dict[str, list[Trajectory]] = {}
    for item in items if answer["success"] else []:
        missing = {"instance_id", "messages", "reward"} - item.keys() if isinstance(item, dict) else {"all"}
        if missing:
            raise HookError(
                f"{url}/get_rollout_data: a trajectory lacks {', '.join(sorted(missing))}: {str(item)[:200]}"
            )
        found = Trajectory(item["instance_id"], item["messages"], item["reward"], item.get("extra_info") or {})
        groups.setdefault(str(found.instance_id), []).append(found)
    return list(groups.values())


def _inner(item: Any) -> Any:
    return item["data"] if isinstance(item, dict) and "data" in item else item


def instance_ids(groups: Sequence[Sequence[Trajectory]]) -> list[Any]:
    """Of each group."""
    return [group[0].instance_id for group in groups]
