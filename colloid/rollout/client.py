"""The HTTP client of a rollout: requests to the router (with exceptions, see direct.py), aborts to the engines.

    send ──► answered
      │ no progress past the deadline, connection lost, 5xx
      └──► aborted by its id at every engine ──► acknowledged, or the engine is unreachable ──► sent again (bounded)

Progress is a completion of any request of this client, or (asked for only after silence) growth of the engines'
counters of generated tokens. So a long response is never cut, and a dead engine is noticed. No request runs twice at
the same time. Where engines are replaced (`engines_changed`), a request that failed with one of them is sent again as
if it had not been sent, and waits while none serves.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from colloid.engines.health import TOKENS_METRIC, fault_of
from colloid.engines.members import PoolView
from colloid.errors import DeadlineExceeded, EngineError
from colloid.rollout.http import Http, RequestRefused
from colloid.rollout.scopes import SCOPE, RequestScope, note_cut
from colloid.rollout.serving import Serving

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-SMG-Routing-Key"
"""By which a router with such a policy (`manual`, `consistent_hashing`) sends requests of a session to one engine."""
MAX_EXCUSED = 10
"""Failures of a request that do not count as attempts, as its engine was lost. A request that takes every engine down
with it ends so.
"""
INTERRUPTED = "interrupted"
"""Set in an answer that `EngineClient.interrupted` cut short: the caller sends what is left, once it may."""


class RequestAborted(EngineError):
    """The rollout that the request belongs to was aborted."""


class EngineClient:
    """Asynchronous; used from one event loop.

    Args:
        router_url: where requests go.
        engine_urls: where aborts and questions about progress go.
        max_connections: requests in flight; more wait here.
        progress_deadline: seconds without progress after which a request is given up.
        max_attempts: times that a request is sent.
        retry_delay: seconds before the second attempt; doubled for each later one.
        no_engine_deadline: seconds that requests wait for an engine where none serves.
        proxy: see `Http`.
        through_router: see `DirectRequests`.
        examine: called after a failure; returns once those engines that are lost are known to be.
    """

    def __init__(
        self,
        router_url: str,
        engine_urls: list[str],
        *,
        api_key: str | None = None,
        max_connections: int = 512,
        progress_deadline: float = 300.0,
        max_attempts: int = 3,
        retry_delay: float = 0.5,
        abort_timeout: float = 30.0,
        no_engine_deadline: float = 1800.0,
        proxy: str | None = None,
        through_router: bool = False,
        examine: Callable[[], Awaitable[None]] | None = None,
    ):
        self._serving = Serving(
            router_url, engine_urls, max_connections, no_engine_deadline, through_router=through_router
        )
        self._http = Http(api_key, proxy)
        self._examine = examine
        self.failed_requests = 0
        """Attempts that ended without an answer that could be used."""
        self._progress_deadline = progress_deadline
        self._max_attempts = max_attempts
        self._retry_delay = retry_delay
        self._abort_timeout = abort_timeout
        self._active: set[str] = set()
        self._expelling: set[asyncio.Task] = set()
        self._last_progress = 0.0
        self._generated_tokens: dict[str, float] = {}
        self._waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._num_holds = 0
        self._resumable: set[str] = set()
        self._interrupted: set[str] = set()
        self._monitor: asyncio.Task | None = None

    @property
    def router_url(self) -> str:
        """Where requests go."""
        return self._serving.router_url

    @property
    def engine_urls(self) -> list[str]:
        """Where aborts and questions about progress go."""
        return self._serving.urls

    def engines_changed(self, view: PoolView, connections: int) -> None:
        """The engines are others from now on.

        Args:
            connections: requests in flight from now on.
        """
        for url in self._serving.apply(view, connections):
            task = asyncio.ensure_future(self._abort(sorted(self._active), [url]))
            self._expelling.add(task)
            task.add_done_callback(self._expelling.discard)

    @property
    def last_progress(self) -> float:
        """The event loop's time at the last progress seen; 0 before the first."""
        return self._last_progress

    @contextmanager
    def scope(self) -> Iterator[RequestScope]:
        """Requests made inside (tasks started inside included) belong to the scope that is yielded."""
        scope = RequestScope()
        token = SCOPE.set(scope)
        try:
            yield scope
        finally:
            SCOPE.reset(token)

    async def generate(
        self, payload: dict[str, Any], *, name: str = "", session: str = "", resumable: bool = False
    ) -> dict[str, Any]:
        """The answer to POST /generate at the router.

        Args:
            payload: without `rid`; the client gives one to each attempt.
            name: of what it is for (a sample), for errors.
            resumable: the caller can go on from a part of the answer, see `interrupted`.
            session: the same for all turns of a conversation, see `SESSION_HEADER`.

        Raises:
            RequestRefused: status 4xx, with the engine's words.
            RequestAborted: the scope was aborted before the request was sent.
            DeadlineExceeded: no progress, at the last attempt.
            EngineError: engine or router unreachable or broken, at the last attempt.
        """
        scope = SCOPE.get()
        rid = uuid.uuid4().hex
        sent = failed = excused = 0
        async with self._serving.slots:
            while True:
                await self._until_it_may_be_sent()
                holds, losses = self._num_holds, self._serving.losses
                attempt = f"{rid}-{sent}"
                if resumable:
                    self._resumable.add(attempt)
                try:
                    answer = await self._attempt({**payload, "rid": attempt}, name, session, scope)
                except (RequestRefused, RequestAborted):
                    raise
                except (EngineError, DeadlineExceeded) as error:
                    self.failed_requests += 1
                    if excused < MAX_EXCUSED and await self._was_lost(losses):
                        excused += 1
                        logger.debug("%s; an engine or the router was lost: sending it again", error)
                    else:
                        failed += 1
                        if failed == self._max_attempts:
                            raise
                        logger.warning("%s; sending it again (%d of %d)", error, failed + 1, self._max_attempts)
                        await asyncio.sleep(self._retry_delay * 2 ** (failed - 1))
                else:
                    if not _aborted(answer):
                        return answer
                    ended = scope is not None and scope.aborted
                    if attempt in self._interrupted and not ended:
                        return {**answer, INTERRUPTED: True}
                    by_update = self._num_holds != holds or self._serving.losses != losses
                    failed += not by_update
                    if failed == self._max_attempts or ended:
                        note_cut(name)
                        return answer
                    if not by_update:
                        logger.warning("the engine aborted the request of %s; sending it again", name)
                finally:
                    self._resumable.discard(attempt)
                    self._interrupted.discard(attempt)
                sent += 1

    async def _until_it_may_be_sent(self) -> None:
        while not (self._may_send.is_set() and self._serving.is_open):
            await self._may_send.wait()
            await self._serving.wait_until_open()

    async def _was_lost(self, losses: int) -> bool:
        """Whether an engine or the router was lost since `losses` of them were, as far as a look at them shows."""
        if self._serving.losses == losses and self._examine is not None:
            await asyncio.sleep(self._retry_delay)
            await self._examine()
        return self._serving.losses != losses

    async def hold(self, *, drain: bool) -> None:
        """Sends nothing more until `release`. What a weight update aborts meanwhile is sent again after it.

        Args:
            drain: return only when no request is running any more; their progress has the usual deadline.
        """
        self._num_holds += 1
        self._may_send.clear()
        if drain:
            await self._idle.wait()

    def release(self) -> None:
        """The inverse of `hold`."""
        self._may_send.set()

    @asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """Inside, resumable requests stand still: their callers have all tokens so far, and nothing new is sent.

        What does not come back within the abort's deadline runs on, and its caller has nothing of it.
        """
        self._num_holds += 1
        self._may_send.clear()
        try:
            clock = asyncio.get_running_loop().time
            deadline = clock() + self._abort_timeout
            while (running := sorted(self._resumable)) and clock() < deadline:
                # Again and again: one that has not reached its engine yet is not aborted by the first call.
                self._interrupted.update(running)
                await self._abort(running)
                await asyncio.sleep(0.05)
            if running:
                logger.warning("%d requests did not stop within %.0f s; they run on", len(running), self._abort_timeout)
            yield
        finally:
            self._may_send.set()

    async def post(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer to a POST at `url`, with this client's key; to /generate of the router: as `generate`."""
        if url.rstrip("/") == f"{self.router_url}/generate":
            return await self.generate({key: value for key, value in payload.items() if key != "rid"})
        return await self._http.request("POST", url, payload)

    async def abort(self, scope: RequestScope) -> list[str]:
        """Aborts all requests of the scope; they return what they have. Returns the engines that did not answer."""
        scope.aborted = True
        return await self._abort(sorted(scope.active))

    async def close(self) -> None:
        if self._monitor is not None:
            self._monitor.cancel()
        for task in self._expelling:
            task.cancel()
        await self._http.close()

    async def _attempt(
        self, payload: dict[str, Any], name: str, session: str, scope: RequestScope | None
    ) -> dict[str, Any]:
        if scope is not None and scope.aborted:
            raise RequestAborted(f"the rollout of {name or 'the request'} was aborted")
        rid = payload["rid"]
        self._active.add(rid)
        if scope is not None:
            scope.active.add(rid)
        try:
            answer = await self._with_progress(payload, rid, name, session)
        except RequestRefused:
            raise
        except (EngineError, DeadlineExceeded, asyncio.CancelledError) as error:
            unreachable = await self._abort([rid])
            if unreachable and not isinstance(error, asyncio.CancelledError):
                where = ", ".join(unreachable)
                raise type(error)(f"{error}; no answer to its abort from {where}") from error
            raise
        finally:
            self._active.discard(rid)
            if scope is not None:
                scope.active.discard(rid)
        for each in answer if isinstance(answer, list) else [answer]:
            if fault := fault_of(each):
                raise EngineError(f"the answer to {name or 'a request'} has {fault}")
        return answer

    async def _with_progress(self, payload: dict[str, Any], rid: str, name: str, session: str) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        started = clock()
        self._waiting += 1
        self._idle.clear()
        self._watch()
        target = ExitStack()
        url = target.enter_context(self._serving.direct.target(payload))
        headers = {SESSION_HEADER: session} if session else {}
        sending = self._http.request("POST", f"{url}/generate", payload, name=name, headers=headers)
        request, cut = asyncio.ensure_future(sending), self._serving.cut()
        try:
            while True:
                silent = clock() - max(started, self._last_progress)
                if silent > self._progress_deadline:
                    raise DeadlineExceeded(
                        f"no engine made progress for {silent:.0f} s (request {rid} of {name or 'a hook'}; engines "
                        f"{', '.join(self.engine_urls)}, router {self.router_url})"
                    )
                timeout = self._progress_deadline - silent + 0.01
                await asyncio.wait({request, cut}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if request.done():
                    self._last_progress = clock()
                    return request.result()
                if cut.done():
                    raise EngineError(f"the request {rid} of {name or 'a hook'} may be at an engine that was lost")
        finally:
            target.close()
            self._waiting -= 1
            if not self._waiting:
                self._idle.set()
            request.cancel()

    async def _abort(self, rids: list[str], urls: list[str] | None = None) -> list[str]:
        """At all engines, or at some. Returns those that did not answer and are not known to be lost."""

        async def one(url: str) -> str | None:
            try:
                for rid in rids:
                    await self._http.request("POST", f"{url}/abort_request", {"rid": rid}, timeout=self._abort_timeout)
            except EngineError as error:
                if url in self.engine_urls:
                    logger.warning("abort at %s: %s", url, error)
                    return url
            return None

        if not rids:
            return []
        return [url for url in await asyncio.gather(*map(one, urls or self.engine_urls)) if url]

    def _watch(self) -> None:
        if self._monitor is None or self._monitor.done():
            self._monitor = asyncio.ensure_future(self._watch_progress())

    async def _watch_progress(self) -> None:
        """While requests wait: after a quarter of the deadline in silence, asks the engines whether tokens come."""
        clock = asyncio.get_running_loop().time
        pause = self._progress_deadline / 4
        while self._waiting:
            await asyncio.sleep(pause)
            if clock() - self._last_progress >= pause:
                grown = await asyncio.gather(*(self._counter_grew(url, pause) for url in self.engine_urls))
                if any(grown):
                    self._last_progress = clock()

    async def _counter_grew(self, url: str, timeout: float) -> bool:
        try:
            text = await self._http.request("GET", f"{url}/metrics", None, timeout=timeout, is_json=False)
        except EngineError as error:
            logger.warning("progress at %s is unknown: %s", url, error)
            return False
        lines = [line for line in text.splitlines() if line.startswith(TOKENS_METRIC)]
        count = sum(float(line.rsplit(" ", 1)[1]) for line in lines)
        before = self._generated_tokens.get(url)
        self._generated_tokens[url] = count
        return before is not None and count > before


def _aborted(answer: Any) -> bool:
    meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
    return (meta.get("finish_reason") or {}).get("type") == "abort"
