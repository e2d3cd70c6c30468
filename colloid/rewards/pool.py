"""A pool of worker processes for code that may hang, crash or block: graders and users' reward functions.

    run ──► waits for a place ──► sent to a worker ──► result
                                    │ raises ──► GradingFailed, worker goes on
                                    │ too long ──► coroutine cancelled, or worker killed and replaced ──► GradingFailed
                                    └ worker dies ──► replaced, run again ──► dies again ──► GradingFailed

Where call after call takes too long, and none succeeds, the function hangs as such: what waits then fails at once, but
for one call at a time that tries again. So a rollout ends although its judge never does.

Invariants: a place always comes back; a worker is started only when a task needs one; the pool has at most `size`
workers; tasks that merely shared a worker with one that had to be killed are run again, each alone in its worker; and
so is, once, a task whose worker died by itself: others may have killed it, or taken the memory that it ran out of.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

START_TIMEOUT = 300.0
"""Seconds for a worker's start and its preload (imports, a reward model)."""
CROWDED = 8
"""Calls in one worker from which on another worker is started rather than adding to them."""
SLOW_CALLS = 2
"""Calls in a row that took too long, for each worker and once more, from which on the function is taken to hang."""
GRACE = 2.0
"""Seconds beyond its limit in which a worker may report a cancelled coroutine itself."""
END_TIMEOUT = 10.0
"""Seconds that a killed worker is waited for."""

_HEADER = struct.Struct("<I")


class GradingFailed(Exception):
    """A call in a worker gave no result. `traceback` is the worker's, where the function raised."""

    def __init__(self, message: str, traceback: str = ""):
        super().__init__(message)
        self.traceback = traceback


class TookTooLong(GradingFailed):
    """The call did not end within its time."""


class _WorkerGone(Exception):
    """The worker died, or was killed while it had other tasks too; this one may be innocent."""


@dataclass(frozen=True)
class _Call:
    started: asyncio.Future
    """Done once the worker has begun with it: from then on its time counts."""
    answer: asyncio.Future

    def fail(self, error: Exception) -> None:
        for future in (self.started, self.answer):
            if not future.done():
                future.set_exception(error)
                future.exception()  # Retrieved, so that asyncio does not report it.


@dataclass(eq=False)
class _Worker:
    process: asyncio.subprocess.Process
    ready: asyncio.Future
    """Done once tasks can run; an exception where the preload failed."""
    reader: asyncio.Task | None = None
    tasks: dict[int, _Call] = field(default_factory=dict)
    exclusive: bool = False
    """Its task is alone in it, and no other joins."""


class WorkerPool:
    """Used from one event loop.

    Args:
        size: workers at most.
        tasks_per_worker: calls at a time in one worker; more than one only serves coroutines.
        shared: pickled once and handed to each worker as `colloid.rewards.worker.SHARED`.
        preload: `(module:function, args)`, called in each worker before its first task, outside of its time limit.
    """

    def __init__(
        self,
        size: int,
        *,
        tasks_per_worker: int = 1,
        shared: dict[str, Any] | None = None,
        preload: tuple[str, tuple] | None = None,
    ):
        self.size = size
        self.tasks_per_worker = tasks_per_worker
        self.num_killed = 0
        self._closed = False
        self._slow_in_row = 0
        self._trying_again = False
        setup = {"path": list(sys.path), "shared": pickle.dumps(shared or {}), "preload": preload}
        self._setup = pickle.dumps(setup)
        self._workers: list[_Worker] = []
        self._calls: set[asyncio.Task] = set()
        self._changed = asyncio.Condition()
        self._next_id = 0

    async def run(self, target: str, args: tuple, timeout: float, *, kill_if_cancelled: bool = False) -> Any:
        """The JSON result of `target` (`module:function`), called with `args` (pickled) in a worker.

        Args:
            kill_if_cancelled: where the caller no longer waits, kill the worker, if it has no other calls.

        Raises:
            GradingFailed: it raised, took longer than `timeout` seconds, or its worker died.
        """
        try:
            return await self._run_once(target, args, timeout, self.tasks_per_worker == 1, kill_if_cancelled)
        except _WorkerGone:
            try:
                return await self._run_once(target, args, timeout, True, kill_if_cancelled)
            except _WorkerGone as error:
                raise GradingFailed(str(error)) from error

    async def close(self) -> None:
        """Kills all workers; calls that still run, and later ones, fail."""
        self._closed = True
        async with self._changed:  # No worker is being started any more.
            self._changed.notify_all()  # Whoever waits for a place hears that there is none any more.
        calls = list(self._calls)
        workers = list(self._workers)
        for worker in workers:
            self._kill(worker, "the pool was closed")
        for worker in workers:
            try:
                await asyncio.wait_for(worker.process.wait(), END_TIMEOUT)
            except asyncio.TimeoutError:
                logger.warning("worker %d was killed, and has not ended after %g s", worker.process.pid, END_TIMEOUT)
            worker.reader.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _run_once(self, target: str, args: tuple, timeout: float, alone: bool, kill_if_cancelled: bool) -> Any:
        worker = await self._place(alone)
        self._trying_again = self._hangs()
        task_id, self._next_id = self._next_id, self._next_id + 1
        loop = asyncio.get_running_loop()
        worker.tasks[task_id] = _Call(loop.create_future(), loop.create_future())
        # Also where the caller no longer waits, the call keeps its place until it ends or is ended.
        call = asyncio.ensure_future(self._call(worker, task_id, target, args, timeout, alone))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if kill_if_cancelled and alone and not call.done():
                self._kill(worker, "its call is no longer waited for")
            raise

    async def _call(self, worker: _Worker, task_id: int, target: str, args: tuple, timeout: float, alone: bool) -> Any:
        call = worker.tasks[task_id]
        try:
            await self._started(worker)
            await self._send(worker, {"id": task_id, "target": target, "args": args, "timeout": timeout})
            await asyncio.shield(call.started)
            result = await asyncio.wait_for(asyncio.shield(call.answer), timeout + GRACE)
            self._slow_in_row = 0
            return result
        except TookTooLong:
            self._slow_in_row += 1
            raise
        except asyncio.TimeoutError:
            message = f"{target} took longer than {timeout:g} s; its worker was killed"
            self._slow_in_row += 1
            self._kill(worker, message, culprit=task_id)
            raise (TookTooLong if alone else _WorkerGone)(message) from None
        except GradingFailed:
            self._slow_in_row = 0  # It raised: so it does not hang.
            raise
        finally:
            self._trying_again = False
            worker.tasks.pop(task_id, None)
            call.fail(GradingFailed("the call has ended"))  # Nobody waits for what is still open.
            worker.exclusive = worker.exclusive and bool(worker.tasks)
            async with self._changed:
                self._changed.notify_all()

    async def _place(self, alone: bool) -> _Worker:
        """A worker with a free place, reserved through `tasks` by the caller before it next yields."""
        async with self._changed:
            while True:
                if self._closed:
                    raise GradingFailed("the pool was closed")
                if self._hangs() and self._trying_again:
                    raise TookTooLong(f"the last {self._slow_in_row} calls took too long, so this one was not made")
                limit = 1 if alone else self.tasks_per_worker
                free = [worker for worker in self._workers if not worker.exclusive and len(worker.tasks) < limit]
                worker = min(free, key=lambda one: len(one.tasks), default=None)
                crowded = worker is None or len(worker.tasks) >= CROWDED
                if crowded and len(self._workers) < self.size:
                    worker = await self._start()
                    self._workers.append(worker)
                if worker is not None:
                    worker.exclusive = alone
                    return worker
                await self._changed.wait()

    def _hangs(self) -> bool:
        return self._slow_in_row >= SLOW_CALLS * (self.size + 1)

    async def _start(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "colloid.rewards.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            start_new_session=True,
            limit=2**26,
        )
        worker = _Worker(process, ready=asyncio.get_running_loop().create_future())
        worker.reader = asyncio.ensure_future(self._read(worker))
        process.stdin.write(_HEADER.pack(len(self._setup)) + self._setup)
        return worker

    async def _started(self, worker: _Worker) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(worker.ready), START_TIMEOUT)
        except asyncio.TimeoutError:
            reason = f"it was not ready after {START_TIMEOUT:g} s"
            self._kill(worker, reason)
            raise TookTooLong(f"a grading worker did not start: {reason}") from None

    async def _send(self, worker: _Worker, task: dict[str, Any]) -> None:
        body = pickle.dumps(task)
        # Where the worker is gone, its reader fails the task.
        with contextlib.suppress(ConnectionError):
            worker.process.stdin.write(_HEADER.pack(len(body)) + body)
            await worker.process.stdin.drain()

    async def _read(self, worker: _Worker) -> None:
        stdout = worker.process.stdout
        try:
            while True:
                (length,) = _HEADER.unpack(await stdout.readexactly(_HEADER.size))
                self._settle(worker, json.loads(await stdout.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await worker.process.wait()
            self._kill(worker, f"its worker process ended with code {code}", by_itself=True)

    def _settle(self, worker: _Worker, answer: dict[str, Any]) -> None:
        call = worker.tasks.get(answer["id"])
        if answer["id"] is not None and call is None:
            return
        future = worker.ready if call is None else call.started if "started" in answer else call.answer
        if future.done():
            return
        if "error" in answer:
            future.set_exception(GradingFailed(answer["error"], answer["traceback"]))
        elif "timeout" in answer:
            future.set_exception(TookTooLong("the call took longer than its time limit"))
        else:
            future.set_result(answer.get("result"))

    def _kill(self, worker: _Worker, reason: str, culprit: int | None = None, by_itself: bool = False) -> None:
        """Removes the worker with all that it started; its other tasks fail, or may be run again.

        Args:
            by_itself: it has died.
        """
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self.num_killed += 1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        logger.debug("grading worker %d is replaced: %s", worker.process.pid, reason)
        if not worker.ready.done():
            worker.ready.set_exception(GradingFailed(f"a grading worker did not start: {reason}"))
            worker.ready.exception()  # Retrieved, so that asyncio does not report it.
        innocent = by_itself or len(worker.tasks) > 1 or not worker.exclusive
        for task_id, call in worker.tasks.items():
            if task_id != culprit:
                call.fail(_WorkerGone(reason) if innocent else GradingFailed(reason))
