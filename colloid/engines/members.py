"""What a pool of engines is made of: its members, what clients see of it, and what it acts through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from colloid.engines.control import EngineAddress
from colloid.engines.health import Health
from colloid.engines.launch import REGULAR, EngineConfig, EngineHandle, WorkerRole


@dataclass(frozen=True)
class Tolerance:
    """How failures are found and survived; the names are those of the options `--rollout-health-check-…`.

    Attributes:
        interval: seconds between two checks of an engine.
        timeout: seconds for an answer, and without a token while requests run.
        first_wait: seconds from an engine's first request until its first check.
    """

    interval: float = 30.0
    timeout: float = 30.0
    first_wait: float = 0.0


class State(Enum):
    """See `colloid.engines.pool`."""

    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass
class Member:
    """One engine.

    Attributes:
        place: what it was started for: its number among the engines of the run; an address, of one that ran already.
        name: `engine_<number>`, or the address; of a replacement with `.<how many before it>`.
        replaces: whether it takes the place of one that was lost.
        strikes: checks in a row that it answered wrongly.
        next_look: when it is checked next, or looked for, or asked whether its last requests have ended.
        leave_by: when its requests are to be done elsewhere.
        busy: whether such a look is under way.
        tokens, last_token: what it had computed at the last check, and when that was seen to grow.
    """

    place: int | str
    name: str
    config: EngineConfig | None = None
    handle: EngineHandle | None = None
    url: str = ""
    kind: str = "embedded"
    state: State = State.STARTING
    replaces: bool = False
    strikes: int = 0
    next_look: float = 0.0
    leave_by: float = 0.0
    busy: bool = False
    tokens: float | None = None
    last_token: float = 0.0

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.url, self.kind, self.name)

    @property
    def is_here(self) -> bool:
        """Whether its process is on this host and this run's own."""
        return self.handle is not None and self.handle.is_here

    @property
    def role(self) -> WorkerRole:
        return REGULAR if self.config is None else self.config.role

    def __str__(self) -> str:
        if isinstance(self.place, str):
            return f"engine {self.place}"
        pid = f", pid {self.handle.pid}" if self.handle is not None else ""
        return f"engine {self.url or 'without an address yet'} ({self.name}{pid})"


@dataclass(frozen=True)
class PoolView:
    """What clients have to know; the next one takes its place.

    Attributes:
        serving: where requests may go.
        leaving: where some may still run.
        expelled: of those, the ones whose requests are to be done elsewhere.
        router_url, router_up: while it is down nothing is sent.
        losses: how often an engine or the router was lost so far. What was sent before one may have failed for it.
        cuts: how often an engine was lost whose connections do not end by themselves.
    """

    serving: tuple[EngineAddress, ...] = ()
    leaving: tuple[EngineAddress, ...] = ()
    expelled: frozenset[str] = frozenset()
    router_url: str = ""
    router_up: bool = True
    losses: int = 0
    cuts: int = 0


class RouterPort(Protocol):
    """What the pool asks of a router."""

    url: str

    def register(self, engine_url: str, role: WorkerRole = REGULAR) -> None: ...

    def deregister(self, engine_url: str) -> None: ...


@dataclass(frozen=True)
class Services:
    """What the pool acts through.

    Attributes:
        launch: see `colloid.engines.launch.Launch`; returns at once.
        background: `(work, done)`: runs `work` elsewhere; later, in the pool's thread, `done` gets its result, or the
            `ColloidError` that it raised.
        check: the health of an engine; `(address, generates)`.
        find: the facts of an engine that runs already, by its address: its `EngineAddress`. Raises `ColloidError`.
        running: requests that run or wait at an engine.
        changed: takes each `PoolView`.
        clock: seconds.
    """

    launch: Callable[[EngineConfig, str, int], EngineHandle]
    router: RouterPort
    background: Callable[[Callable[[], Any], Callable[[Any], None]], None]
    check: Callable[[EngineAddress, bool], Health]
    find: Callable[[str], EngineAddress]
    running: Callable[[EngineAddress], int]
    changed: Callable[[PoolView], None]
    clock: Callable[[], float]


@dataclass
class Counts:
    """Of the run so far."""

    replaced: int = 0
    """Engines that took the place of a failed one and serve."""
    lost: int = 0
    joined: int = 0
    """Engines that ran already and were added while the run went on."""
    left: int = 0
    """Engines that ran already and were let go, as they are listed no more: after their last requests had ended, or
    before they served. One that failed while it left is lost."""
