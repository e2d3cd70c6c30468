"""The actor processes of a run, by the names that its errors give them, and the waits for what they do.

A wait ends with the first failure. Whatever failed first, a process that has died is the culprit: what the others say
(a closed connection, a collective operation that timed out, lost data) follows from it. So each failure waits a moment
for such news. Processes that a wait is not about are asked for a sign of life now and then: that a trainer rank died is
known while a rollout is waited for. One that is always to answer, as it does its work in pieces or in threads, has
failed where it gives none for too long.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from colloid import errors
from colloid.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    HookError,
    ProcessDied,
    ProcessFailed,
    written_for_user,
)

REPORT_EVERY = 60.0
"""Seconds between two log lines of a wait."""
ASK_EVERY = 5.0
"""Seconds between two questions for a sign of life."""
LOOK_EVERY = 1.0
"""Seconds between two calls of what is to be done meanwhile."""
GRACE = 3.0
"""Seconds after a failure in which the news of a death may come that explains it."""


@dataclass
class Member:
    """One actor process."""

    name: str
    actor: Any
    place: str = ""
    """Its process and host, once it has said so."""
    question: Any = None
    """A Ray reference: it is being asked for a sign of life."""
    asked: float = -ASK_EVERY
    silence: float = math.inf
    """Seconds that it may take to answer that question."""

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


def sign_of_life(_actor: Any) -> str:
    """Runs in an actor: its process and host."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


class Processes:
    """The actors of a run.

    Args:
        log: takes a line each `REPORT_EVERY` seconds of waiting.
    """

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._members: dict[str, Member] = {}
        self._dead: dict[str, Exception] = {}

    def add(self, name: str, actor: Any, silence: float = math.inf) -> Any:
        """Names an actor ("trainer rank 1"). Returns it.

        Args:
            silence: seconds without a sign of life after which it has failed; not bounded where a call of its own may
                keep it busy.
        """
        member = Member(name, actor, silence=silence)
        self._members[actor._actor_id.hex()] = member
        self._question(member, time.monotonic())
        return actor

    @property
    def any_died(self) -> bool:
        """Whether the news of a death has come."""
        return bool(self._dead)

    def wait(
        self, references: Sequence[Any], what: str, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """The values of calls to the actors, in order.

        Args:
            references: Ray references.
            what: named in the log and in the error, e.g. "trainer ranks to start".
            deadline: seconds.
            meanwhile: called each `LOOK_EVERY` seconds of waiting; it may wait itself.

        Raises:
            DeadlineExceeded: not all came in time; says whose did not. Or a process, one of those that are waited for
                or another one, gave no sign of life for longer than it may.
            ProcessDied: a process has ended, one of those that are waited for or another one.
            ProcessFailed: a process raised an error that was written for nobody; names those that gave no answer.
            What a process raised, where that was written for the user; as soon as it did.
        """
        import ray

        references, pending = list(references), list(references)
        start = reported = looked = time.monotonic()
        while pending:
            now = time.monotonic()
            if now - start > deadline:
                raise DeadlineExceeded(f"waited {now - start:.0f} s for {what}; missing: {self._named(pending)}")
            if now - reported > REPORT_EVERY:
                reported = now
                self._log(f"waiting for {what}: {self._named(pending)} missing after {now - start:.0f} s")
            if meanwhile is not None and now - looked > LOOK_EVERY:
                meanwhile()
                looked = time.monotonic()
            questions = self._ask(now)
            timeout = max(0.05, min(ASK_EVERY if meanwhile is None else LOOK_EVERY, deadline - (now - start)))
            waiting = [*pending, *questions]
            done = ray.wait(waiting, timeout=timeout)[0] and ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
            for reference in done:
                try:
                    self._answered(reference)
                except Exception as error:
                    self._fail(error, reference, pending, what)
                if reference in pending:
                    pending.remove(reference)
            self._check_silence(now, what)  # only what had not come either when it was looked for after `now`
        return ray.get(references)

    def end(self, references: Sequence[Any], deadline: float) -> list[Any]:
        """The values of those calls that end well within `deadline` seconds; the others are logged, and processes that
        gave no answer are killed.
        """
        import ray

        values = []
        done, pending = ray.wait(list(references), num_returns=len(references), timeout=deadline)
        for reference in done:
            try:
                values.append(ray.get(reference))
            except ray.exceptions.RayActorError as error:
                member = self._member(reference)
                if self._dead.setdefault(member.actor._actor_id.hex(), error) is error:
                    self._log(f"{member} ended before the run did: {last_line(error)}")
            except Exception as error:
                self._log(f"{self._member(reference) or 'a process'} did not end in an orderly way: {last_line(error)}")
        for reference in pending:
            member = self._member(reference)
            self._log(f"{member} did not end within {deadline:g} s, and is killed")
            self._dead[member.actor._actor_id.hex()] = ProcessDied(f"{member} was killed")
            ray.kill(member.actor)
        return values

    def _fail(self, error: Exception, reference: Any, pending: list[Any], what: str) -> None:
        """Raises what the failure of a call comes down to."""
        written = written_for_user(error)
        if isinstance(written, ConfigError | DataError | HookError):
            raise error
        failed, others = self._member(reference), [one for one in pending if one != reference]
        dead = self._find_dead(others)
        if getattr(error, "actor_init_failed", False):
            raise _error_of_start(f"{failed} could not be started", error) from error
        if dead:
            raise ProcessDied(
                f"{' and '.join(map(str, dead))} ended while the run waited for {what}. Was it killed, or out of "
                "memory? The run goes on from its last checkpoint with --load, and by itself with --max-restarts"
            ) from error
        if written is not None:
            raise error
        silent = [one for one in others if not self._ready(one)]
        raise ProcessFailed(
            f"{failed} failed while the run waited for {what}: {last_line(error)}"
            + (f"; without an answer: {self._named(silent)}" if silent else "")
        ) from error

    def _find_dead(self, pending: list[Any]) -> list[Member]:
        """The members that have died. Returns when all others gave a sign of life, or after `GRACE` seconds."""
        import ray

        until = time.monotonic() + GRACE
        self._ask(time.monotonic(), every=0.0)
        while not self._dead and (left := until - time.monotonic()) > 0:
            questions = [member.question for member in self._members.values() if member.question is not None]
            if not questions:
                break
            for reference in ray.wait([*pending, *questions], timeout=left)[0]:
                pending = [one for one in pending if one != reference]
                with contextlib.suppress(Exception):  # of those that live: it follows from what is looked for
                    self._answered(reference)
        return [self._members[key] for key in self._dead]

    def _ask(self, now: float, every: float = ASK_EVERY) -> list[Any]:
        """References of the questions that are open, one a living member at most."""
        for key, member in self._members.items():
            if member.question is None and now - member.asked >= every and key not in self._dead:
                self._question(member, now)
        return [member.question for member in self._members.values() if member.question is not None]

    def _check_silence(self, now: float, what: str) -> None:
        for member in self._members.values():
            if member.question is not None and now - member.asked > member.silence:
                raise DeadlineExceeded(
                    f"{member} gave no sign of life for {now - member.asked:.0f} s while the run waited for {what}. It "
                    "hangs, or a hook in it blocks its event loop"
                )

    def _question(self, member: Member, now: float) -> None:
        member.question, member.asked = member.actor.__ray_call__.remote(sign_of_life), now

    def _answered(self, reference: Any) -> None:
        """Takes note of an answer; raises the error that it is."""
        import ray

        member = self._member(reference)
        asked = member is not None and member.question == reference
        if asked:
            member.question = None
        try:
            value = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            if asked and isinstance(error, ray.exceptions.ActorUnavailableError):
                return  # nothing that the run needs was lost
            if member is not None:
                self._dead[member.actor._actor_id.hex()] = error
            raise
        if asked:
            member.place = value

    def _member(self, reference: Any) -> Member | None:
        """Whose call it is."""
        return self._members.get(reference.task_id().actor_id().hex())

    def _named(self, references: list[Any]) -> str:
        return ", ".join(str(self._member(reference) or "a process") for reference in references)

    def _ready(self, reference: Any) -> bool:
        import ray

        return bool(ray.wait([reference], timeout=0)[0])


def _error_of_start(what: str, error: Exception) -> Exception:
    """Where an actor's constructor raised: Ray keeps the text of it alone."""
    found = re.fullmatch(r"colloid\.errors\.(\w+): (.*)", last_line(error))
    return getattr(errors, found[1])(found[2]) if found else ProcessFailed(f"{what}: {last_line(error)}")


def last_line(error: BaseException) -> str:
    """What went wrong, without the tracebacks that Ray puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:500] if lines else repr(error)
