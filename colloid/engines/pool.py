"""Which engines a fleet has, and what becomes of each: a state machine without threads of its own.

    starting ──► joining ──► serving ──► leaving ──► gone
        │           │           │                     ▲
        └───────────┴───────────┴── failed ───────────┘──► another one is started in its place

* starting: its process loads the model; one that runs already has not answered yet, or its address still leaves.
* joining: it serves, but lacks the current weights.
* serving: in the router and in the clients' list. Only these get requests.
* leaving: gets no new requests; what runs there finishes, or is done elsewhere after a deadline.

Invariants:
* A place has one member that is not leaving or gone; an engine is started in it only once the one before has ended.
* Nobody is told of a loss before the router has let go of the engine, so what is sent after it meets the others.
* Without a `Tolerance` the first failure is `failure`, and nothing is replaced.

All methods are called from one thread. What takes long runs through `Services.background`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from colloid.engines.health import Health, Verdict
from colloid.engines.launch import EngineConfig, EngineHandle
from colloid.engines.members import Counts, Member, PoolView, Services, State, Tolerance
from colloid.errors import ColloidError, EngineError

logger = logging.getLogger(__name__)

MAX_START_FAILURES = 3
"""Times in a row that an engine may fail to start in a place."""
MAX_STRIKES = 3
"""Checks in a row that an engine may answer wrongly."""
DRAIN_SECONDS = 120.0
"""Until the requests of a leaving engine are done elsewhere."""
RETRY_SECONDS = 5.0
"""Between two looks at an engine that runs already and does not answer, and at one that leaves."""


class Pool:
    """See the top of this file.

    Args:
        tolerance: None: the first failure ends it.
        gets_weights: whether engines wait for the trainer's weights before they serve.
    """

    def __init__(self, services: Services, tolerance: Tolerance | None = None, *, gets_weights: bool = True):
        self._services, self.tolerance, self._gets_weights = services, tolerance, gets_weights
        self.members: list[Member] = []
        self.counts = Counts()
        self.failure: ColloidError | None = None
        self.closed = False
        self._router_up, self._losses, self._cuts = True, 0, 0
        self._expelled: set[str] = set()
        self.num_pauses, self._epoch = 0, 0
        self._holds_starts = False
        self._waiting: list[tuple[int, EngineConfig]] = []
        self._generation: dict[int | str, int] = {}
        self._start_failures: dict[int | str, int] = {}

    # ---- who is there

    def of(self, *states: State) -> list[Member]:
        return [member for member in self.members if member.state in states]

    def view(self) -> PoolView:
        return PoolView(
            tuple(member.address for member in self.of(State.SERVING)),
            tuple(member.address for member in self.of(State.LEAVING)),
            frozenset(self._expelled),
            self._services.router.url,
            self._router_up,
            self._losses,
            self._cuts,
        )

    # ---- coming

    def add(self, place: int, config: EngineConfig, handle: EngineHandle) -> Member:
        """The first engine of a place; `ready` is next."""
        member = Member(place, self._next_name(place), config, handle, kind=config.kind)
        self.members.append(member)
        return member

    def add_external(self, address: str) -> Member:
        """An engine that runs already: it joins once it answers, and again after it was lost."""
        member = Member(address, self._next_name(address), next_look=self._services.clock())
        self.members.append(member)
        return member

    def follow(self, addresses: Sequence[str]) -> None:
        """These are the engines that run already and are to be in the pool: others of them leave."""
        known = {member.place: member for member in self.members if member.state is not State.LEAVING}
        for address in addresses:
            if address not in known:
                logger.info("engine %s is to join", address)
                self.add_external(address)
        for place, member in known.items():
            if isinstance(place, str) and place not in addresses:
                self.leave(member)

    def ready(self, member: Member, url: str, kind: str = "") -> None:
        """A starting member serves."""
        member.url, member.kind, member.state = url, kind or member.kind, State.JOINING
        logger.debug("%s is there", member)
        if not self._gets_weights:
            self.admit([member.name])

    def admit(self, names: Iterable[str]) -> None:
        """Joining members, by name, hold the current weights: from now on they serve. Others are left as they are.

        Raises:
            EngineError: without a tolerance, where the router does not take one.
        """
        for name in list(names):
            member = next((m for m in self.of(State.JOINING) if m.name == name), None)
            if member is None:
                continue
            if self._router_up:
                try:
                    self._services.router.register(member.url, member.role)
                except EngineError as error:
                    self._deregister(member)  # it may take it later, when nobody knows what weights it has
                    self.lose(member, f"cannot be registered: {error}")
                    if self.tolerance is None:
                        raise
                    continue
            now = self._services.clock()
            member.state, member.strikes, member.tokens, member.last_token = State.SERVING, 0, None, now
            member.next_look = now + (self.tolerance.first_wait if self.tolerance else 0.0)
            self._start_failures.pop(member.place, None)
            self.counts.replaced += member.replaces
            self.counts.joined += not member.replaces
            logger.info("%s serves%s", member, ", in the place of one that was lost" if member.replaces else "")
        self._changed()

    # ---- going

    def lose(self, member: Member, reason: str) -> None:
        """A member failed: it is taken out, and with a tolerance replaced."""
        if member.state is State.GONE:
            return
        was, member.state = member.state, State.GONE
        self.members.remove(member)
        self.counts.lost += 1
        if self.tolerance is None and (was is State.SERVING or isinstance(member.place, int)):
            self.fail(EngineError(f"{member} {reason}"))
            return
        logger.error("%s is taken out: it %s", member, reason)
        if was in (State.SERVING, State.LEAVING):
            if was is State.SERVING:
                self._deregister(member)
            self._losses += 1
            self._cuts += not member.is_here  # a process here is killed, which ends its connections
            self._expelled.discard(member.url)
            self._changed()
        elif was is State.JOINING and isinstance(member.place, int) and self._failed_to_start(member, reason):
            return
        if was is not State.LEAVING:
            self._replace(member)

    def leave(self, member: Member) -> None:
        """A member is to go: its requests finish first, see `DRAIN_SECONDS`."""
        if member.state is State.SERVING:
            self._deregister(member)
            now = self._services.clock()
            member.state, member.next_look, member.leave_by = State.LEAVING, now, now + DRAIN_SECONDS
            logger.info("%s leaves once its requests have ended", member)
            self._changed()
        elif member.state is not State.LEAVING:
            self._gone(member)

    def fail(self, error: ColloidError) -> None:
        """The run cannot go on."""
        self.failure = self.failure or error
        self._changed()

    # ---- time passes

    def pause(self) -> None:
        """Engines may not answer from now on, e.g. while they get weights; none leaves for good. Can be nested."""
        self.num_pauses, self._epoch = self.num_pauses + 1, self._epoch + 1

    def resume(self) -> None:
        self.num_pauses, self._epoch = self.num_pauses - 1, self._epoch + 1
        for member in self.members:
            member.last_token = self._services.clock()

    def hold_starts(self, holds: bool) -> None:
        """Whether engines that are to be started wait: someone else has the memory that they would need."""
        self._holds_starts = holds
        while self._waiting and not (holds or self.closed):
            self._start(*self._waiting.pop(0))

    def step(self) -> None:
        """Looks at everything once; to be called a few times a second."""
        for member in list(self.members):
            handle = member.handle
            if handle is not None and member.state is not State.STARTING and handle.exit_code is not None:
                self.lose(member, handle.how_it_ended())
        now, leaving = self._services.clock(), {member.place for member in self.of(State.LEAVING)}
        for member in list(self.members):
            if member.busy or member.next_look > now:
                continue
            if member.state is State.SERVING and self.tolerance and not self.num_pauses:
                self._check(member, generates=False)
            elif member.state is State.STARTING and isinstance(member.place, str) and member.place not in leaving:
                self._find(member)
            elif member.state is State.LEAVING and not self.num_pauses:
                self._look_at_leaving(member)

    def examine(self, done: Callable[[], None]) -> None:
        """Requests fail: checks all that serve, now, with a request of its own; then calls `done`."""
        self.step()
        waiting = [] if self.num_pauses or not self.tolerance else self.of(State.SERVING)
        if not waiting:
            done()
            return
        left = {member.name for member in waiting}

        def looked_at(member: Member) -> None:
            left.discard(member.name)
            if not left:
                done()

        for member in waiting:
            self._check(member, generates=True, then=looked_at)

    def router_lost(self, reason: str) -> None:
        """The router is down: nothing is sent until `router_back`."""
        if self.tolerance is None:
            self.fail(EngineError(f"the router {self._services.router.url} {reason}"))
            return
        logger.error("the router %s %s; it is started again", self._services.router.url, reason)
        self._router_up, self._losses = False, self._losses + 1
        self._changed()

    def router_back(self) -> None:
        """A router without engines answers: those that serve are registered."""
        self._router_up = True
        for member in self.of(State.SERVING):
            try:
                self._services.router.register(member.url, member.role)
            except EngineError as error:
                self.lose(member, f"cannot be registered: {error}")
        logger.info("the router %s is back", self._services.router.url)
        self._changed()

    # ---- inside

    def _check(self, member: Member, *, generates: bool, then: Callable[[Member], None] | None = None) -> None:
        epoch, address = self._epoch, member.address
        member.busy = True

        def done(health: Health) -> None:
            member.busy = False
            if member.state is State.SERVING and epoch == self._epoch:
                self._judge(member, health)
            if then is not None:
                then(member)

        self._services.background(lambda: self._services.check(address, generates), done)

    def _judge(self, member: Member, health: Health) -> None:
        assert self.tolerance is not None
        now = self._services.clock()
        member.next_look = now + self.tolerance.interval
        if health.verdict is Verdict.LOST:
            self.lose(member, f"does not answer its health check: {health.reason}")
            return
        if health.verdict is Verdict.BROKEN:
            member.strikes += 1
            logger.warning("%s answers wrongly (%d of %d): %s", member, member.strikes, MAX_STRIKES, health.reason)
            member.next_look = now + min(1.0, self.tolerance.interval)
            if member.strikes >= MAX_STRIKES:
                self.lose(member, f"answered wrongly {member.strikes} times: {health.reason}")
            return
        member.strikes = 0
        if health.tokens is None:
            return
        if health.tokens != member.tokens or not health.running:
            member.tokens, member.last_token = health.tokens, now
        elif now - member.last_token > self.tolerance.timeout:
            silent = now - member.last_token
            self.lose(member, f"has made no token for {silent:.0f} s, though {health.running} requests run there")

    def _replace(self, member: Member) -> None:
        handle, place = member.handle, member.place
        if isinstance(place, str):
            again = self.add_external(place)
            again.replaces, again.next_look = True, self._services.clock() + RETRY_SECONDS
            return

        def ended(_result: Any) -> None:
            self._waiting.append((place, member.config))
            self.hold_starts(self._holds_starts)

        self._services.background(lambda: handle and handle.stop(0.0), ended)

    def _start(self, place: int, config: EngineConfig) -> None:
        member = Member(place, self._next_name(place), config, kind=config.kind, replaces=True)
        self.members.append(member)

        def launched(result: Any) -> None:
            if isinstance(result, ColloidError):
                started(result)
                return
            member.handle = result
            if self.closed:
                result.terminate()
                return
            logger.info("%s is started in the place of one that was lost", member)
            self._services.background(result.wait_until_ready, started)

        def started(result: Any) -> None:
            if self.closed:
                return
            if not isinstance(result, ColloidError):
                self.ready(member, result)
                return
            if not self._failed_to_start(member, str(result)):
                member.state = State.GONE
                self.members.remove(member)
                self._replace(member)

        self._services.background(lambda: self._services.launch(config, member.name, place), launched)

    def _failed_to_start(self, member: Member, reason: str) -> bool:
        """Whether that was once too often, and the run cannot go on."""
        failures = self._start_failures.get(member.place, 0) + 1
        self._start_failures[member.place] = failures
        if failures >= MAX_START_FAILURES:
            self.fail(EngineError(f"{member.name} could not be started {failures} times in a row: {reason}"))
            return True
        logger.error("%s could not be started (%d of %d): %s", member.name, failures, MAX_START_FAILURES, reason)
        return False

    def _find(self, member: Member) -> None:
        member.busy = True

        def found(result: Any) -> None:
            member.busy = False
            member.next_look = self._services.clock() + RETRY_SECONDS
            if member.state is not State.STARTING:
                return
            if not isinstance(result, ColloidError):
                self.ready(member, result.url, result.kind)
                return
            logger.log(logging.DEBUG if member.strikes else logging.WARNING, "%s cannot join: %s", member, result)
            member.strikes += 1  # said once

        self._services.background(lambda: self._services.find(str(member.place)), found)

    def _look_at_leaving(self, member: Member) -> None:
        member.busy, address = True, member.address

        def counted(result: Any) -> None:
            member.busy = False
            now = self._services.clock()
            member.next_look = now + min(1.0, RETRY_SECONDS)
            if member.state is not State.LEAVING:
                return
            if result == 0:
                self._gone(member)
            elif isinstance(result, ColloidError) or now > member.leave_by + DRAIN_SECONDS:
                self.lose(member, f"does not end its last requests: {result}")
            elif now > member.leave_by and member.url not in self._expelled:
                logger.warning("%s still has %d requests: they are done elsewhere", member, result)
                self._expelled.add(member.url)
                self._losses += 1
                self._changed()

        self._services.background(lambda: self._services.running(address), counted)

    def _gone(self, member: Member) -> None:
        member.state = State.GONE
        self.members.remove(member)
        self._expelled.discard(member.url)
        self.counts.left += 1
        logger.info("%s has left", member)
        self._changed()

    def _deregister(self, member: Member) -> None:
        if self._router_up:
            try:
                self._services.router.deregister(member.url)
            except EngineError as error:
                logger.warning("%s", error)

    def _next_name(self, place: int | str) -> str:
        before = self._generation[place] = self._generation.get(place, -1) + 1
        first = f"engine_{place}" if isinstance(place, int) else place
        return f"{first}.{before}" if before else first

    def _changed(self) -> None:
        self._services.changed(self.view())
