"""The rollout engines of a run and the router in front of them.

Life: engine processes start, each on a port of its own (or run already) -> each serves -> the router registers them ->
what fails is replaced, engines come and leave (`colloid.engines.pool`) -> at the end an external router forgets them,
and all that were started are stopped together; and all die with this process, however it ends.

One thread owns the pool and its router; callers hand it what it is to do and wait. What takes long (an engine that
starts, a health check) has a thread of its own, and reports to the owner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colloid.engines.control import EngineAddress, EngineControl
from colloid.engines.external import AddressFile, Expected, find_engine
from colloid.engines.health import Health, Verdict, check_engine, counters
from colloid.engines.launch import EngineConfig, EngineHandle, Launch, launch_engine
from colloid.engines.members import Counts, PoolView, Services, State, Tolerance
from colloid.engines.pool import Pool
from colloid.engines.router import ExternalRouter, Router, RouterConfig
from colloid.engines.router_watch import RouterWatch
from colloid.errors import ColloidError, ConfigError, EngineError

logger = logging.getLogger(__name__)

TICK = 0.2
"""Seconds between two looks at processes."""
EXAMINE_CALLS = 3
"""An engine is asked so many things one after another."""
NAMING_TIMEOUT = 10.0
"""Seconds that an engine may take to answer before it is named as the one that hangs."""


@dataclass(frozen=True)
class External:
    """Engines that run already.

    Attributes:
        addresses: `http://host:port` of those at the start.
        file: where they are listed, if the list may change; `read` parses it.
    """

    addresses: tuple[str, ...]
    expected: Expected = Expected()
    file: Path | None = None
    read: Callable[[], Iterable[str]] | None = None


@dataclass(frozen=True)
class FleetConfig:
    """What the fleet needs to know: one `EngineConfig` an engine.

    Attributes:
        api_key, log_dir: of engines that run already and of the router; else they are those of the first engine.
        external: engines that run already, in the place of `engines` or beside them.
        tolerance: how failures are survived; None: the first one ends the run.
        gets_weights: whether an engine has to be given the trainer's weights before it serves.
    """

    engines: tuple[EngineConfig, ...] = ()
    router: RouterConfig = field(default_factory=RouterConfig)
    api_key: str = field(default="", repr=False)
    log_dir: Path = Path("engines")
    external: External | None = None
    tolerance: Tolerance | None = None
    gets_weights: bool = True

    def __post_init__(self) -> None:
        if self.engines:
            object.__setattr__(self, "api_key", self.engines[0].api_key)
            object.__setattr__(self, "log_dir", self.engines[0].log_dir)


class Fleet:
    """Starts engines and router; `addresses` and `router_url` are valid after `start`.

    Args:
        launch: starts one engine; those on another node have a `launch` of their own.
    """

    def __init__(self, config: FleetConfig, launch: Launch = launch_engine):
        self._config, self._launch = config, launch
        self._subscribers: list[Callable[[PoolView], None]] = []
        self._router: Router | ExternalRouter | None = None
        self._pool: Pool | None = None
        self._watch: RouterWatch | None = None
        self._file: AddressFile | None = None
        self._first: list[EngineHandle] = []
        self._owner = ThreadPoolExecutor(1, thread_name_prefix="fleet")
        self._stopping = threading.Event()
        self._ticker: threading.Thread | None = None

    @property
    def router_url(self) -> str:
        assert self._router is not None, "start comes first"
        return self._router.url

    @property
    def engine_pids(self) -> list[int]:
        """The processes of the engines that were started on this host."""
        handles = self._own(lambda: [member.handle for member in self._pool.members])
        return [handle.pid for handle in handles if handle is not None and handle.is_here]

    @property
    def pids(self) -> list[int]:
        """All processes of the fleet, engines first."""
        return self.engine_pids + ([self._router.pid] if isinstance(self._router, Router) else [])

    @property
    def tolerance(self) -> Tolerance | None:
        return self._config.tolerance

    @property
    def addresses(self) -> list[EngineAddress]:
        """The engines that serve, and those that would with the current weights."""
        return self._own(lambda: [m.address for m in self._pool.of(State.SERVING, State.JOINING)])

    @property
    def joining(self) -> list[EngineAddress]:
        """The engines that lack nothing but the current weights."""
        return self._own(lambda: [member.address for member in self._pool.of(State.JOINING)])

    @property
    def changes(self) -> bool:
        """Whether engines are replaced, or come and go."""
        return self._config.tolerance is not None or self._file is not None

    @property
    def failure(self) -> ColloidError | None:
        """Why the run cannot go on."""
        return self._pool.failure if self._pool else None

    def start(self) -> None:
        """Returns when every engine serves and is known to the router; only then are failures survived.

        Raises:
            EngineError: an engine ended, or did not serve within its deadline; with the end of its log. Or the
                external router does not answer.
            ConfigError: an engine that runs already does not fit.
        """
        config = self._config
        try:
            if config.router.url:  # before any model is loaded
                self._router = ExternalRouter(config.router.url, config.api_key)
            found = [self._find(address) for address in (config.external.addresses if config.external else ())]
            for index, engine in enumerate(config.engines):
                self._first.append(self._launch(engine, f"engine_{index}", index))
            if self._router is None:
                self._router = Router(config.router, config.api_key, config.log_dir)
            urls = [handle.wait_until_ready() for handle in self._first]
            self._own(lambda: self._assemble(found, urls))
        except BaseException:
            self.stop()
            raise
        self._ticker = threading.Thread(target=self._tick, name="fleet-ticker", daemon=True)
        self._ticker.start()

    def subscribe(self, changed: Callable[[PoolView], None]) -> Callable[[], None]:
        """`changed` takes the `PoolView` of now and each later one, in a thread of the fleet's, until what is returned
        is called.
        """

        def subscribe() -> None:
            self._subscribers.append(changed)
            changed(self._pool.view())

        self._own(subscribe)
        return lambda: self._own(lambda: self._subscribers.remove(changed))

    def admit(self, engines: Iterable[EngineAddress]) -> None:
        """These hold the current weights: those that have not served yet do from now on."""
        names = [engine.name for engine in engines]
        self._own(lambda: self._pool.admit(names))

    def drop(self, engines: Iterable[EngineAddress], reason: str) -> None:
        """These are taken out and, with a tolerance, replaced."""
        names = {engine.name for engine in engines}

        def drop() -> None:
            for member in [member for member in self._pool.members if member.name in names]:
                self._pool.lose(member, reason)

        self._own(drop)

    def drop_silent(self, engines: Iterable[EngineAddress]) -> list[EngineAddress]:
        """Takes out those that have ended or don't answer; returns all of `engines` that are not there any more."""
        engines = list(engines)
        self._own(self._look)
        alive = {engine.name for engine in self.addresses}
        silent = [engine for engine, health in self._ask(engines) if health.verdict is Verdict.LOST]
        self.drop([engine for engine in silent if engine.name in alive], "does not answer")
        left = {engine.name for engine in self.addresses}
        return [engine for engine in engines if engine.name not in left]

    def pause_checks(self) -> None:
        """Engines may not answer until `resume_checks`, once for each call of this."""
        self._own(lambda: self._pool.pause())

    def resume_checks(self) -> None:
        self._own(lambda: self._pool.resume())

    def hold_starts(self, holds: bool) -> None:
        """Whether replacements wait to be started: someone else has the memory that they would need."""
        self._own(lambda: self._pool.hold_starts(holds))

    @property
    def num_starting(self) -> int:
        """Engines whose processes load their model."""
        return self._own(lambda: len([m for m in self._pool.of(State.STARTING) if m.config is not None]))

    def examine(self) -> None:
        """Requests fail: returns once all processes, and with a tolerance all serving engines, have been looked at."""
        done = threading.Event()

        def examine() -> None:
            self._watch.step()
            self._pool.examine(done.set)

        self._own(examine)
        tolerance = self._config.tolerance
        if not done.wait(EXAMINE_CALLS * (tolerance.timeout if tolerance else 0.0) + NAMING_TIMEOUT):
            logger.warning("not all engines have been looked at yet")

    def check(self) -> None:
        """Raises `EngineError` where an engine or the router has ended, or does not answer: names them."""
        self._own(self._look)
        if self.failure is not None:
            raise self.failure
        silent = [
            f"engine {engine.url} ({engine.name}) does not answer its health check: {health.reason}"
            for engine, health in self._ask(self.addresses)
            if health.verdict is not Verdict.HEALTHY
        ]
        if not self._router.answers(NAMING_TIMEOUT):
            silent.append(f"the router {self._router.url} does not answer")
        if silent:
            raise EngineError("; ".join(silent))

    def metrics(self) -> dict[str, float]:
        """`engine/…` and `router/…`: how many serve, and what was replaced in the run so far. Empty where neither
        failures are survived nor engines come and go.
        """
        if not self.changes:
            return {}
        return self._own(
            lambda: {
                "engine/alive": float(len(self._pool.of(State.SERVING))),
                "engine/replaced": float(self._pool.counts.replaced),
                "engine/joined": float(self._pool.counts.joined),
                "engine/left": float(self._pool.counts.left),
                "router/restarted": float(self._watch.restarted),
            }
        )

    def stop(self) -> None:
        """Ends the router, then the engines; those that ran before are left running, and not paused."""
        self._stopping.set()
        handles, external = list(self._first), []
        if self._pool is not None:
            self._own(self._close)
            handles += [member.handle for member in self._pool.members if member.handle not in (None, *handles)]
            external = [member.url for member in self._pool.members if member.handle is None and member.url]
        if self._router is not None:
            self._router.stop()
        for url in external:
            try:
                EngineControl(url, self._config.api_key, NAMING_TIMEOUT).post("/continue_generation")
            except EngineError as error:
                logger.warning("%s", error)
        for handle in handles:
            handle.terminate()
        for handle in handles:
            handle.stop()

    def _ask(self, engines: list[EngineAddress]) -> list[tuple[EngineAddress, Health]]:
        """Their health, all at once."""
        with ThreadPoolExecutor(max(1, len(engines)), thread_name_prefix="look") as threads:
            found = threads.map(lambda each: check_engine(each, self._config.api_key, NAMING_TIMEOUT), engines)
            return list(zip(engines, found, strict=True))

    # ---- the owner's thread

    def _assemble(self, found: list[EngineAddress], urls: list[str]) -> None:
        config = self._config
        services = Services(
            launch=self._launch,
            router=self._router,
            background=self._background,
            check=self._health,
            find=self._find,
            running=lambda engine: counters(EngineControl(engine.url, config.api_key, NAMING_TIMEOUT))[0],
            changed=self._tell,
            clock=time.monotonic,
        )
        pool = Pool(services, config.tolerance, gets_weights=config.gets_weights)
        self._pool = pool
        for index, (engine, handle, url) in enumerate(zip(config.engines, self._first, urls, strict=True)):
            pool.ready(pool.add(index, engine, handle), url)
        for engine in found:
            pool.ready(pool.add_external(engine.url), engine.url, engine.kind)
        pool.admit([member.name for member in pool.members])
        if pool.failure is not None:
            raise pool.failure
        pool.counts = Counts()
        self._watch = RouterWatch(self._router, pool, self._background, time.monotonic)
        external = config.external
        if external is not None and external.file is not None:
            self._file = AddressFile(external.file, external.read, time.time)

    def _look(self) -> None:
        if self._pool.closed:
            return
        self._watch.step()
        self._pool.step()
        if self._file is not None and not self._pool.num_pauses:
            try:
                addresses = self._file.changed()
            except ConfigError as error:
                logger.error("%s: the engines stay as they are", error)
            else:
                if addresses is not None:
                    self._pool.follow(list(addresses))

    def _tell(self, view: PoolView) -> None:
        for subscriber in self._subscribers:
            subscriber(view)

    def _close(self) -> None:
        self._pool.closed = True

    # ---- threads

    def _tick(self) -> None:
        while not self._stopping.wait(TICK):
            self._own(self._look)

    def _own(self, call: Callable[[], Any]) -> Any:
        """The result of a call in the owner's thread."""
        return self._owner.submit(self._guarded, call).result()

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            if self._pool is not None and not isinstance(error, ColloidError):  # nobody may be there to see it
                logger.exception("the engines can no longer be looked after")
                self._pool.fail(EngineError(f"the engines can no longer be looked after: {error!r}"))
            raise

    def _background(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        def run() -> None:
            try:
                result = work()
            except ColloidError as error:
                result = error
            except Exception as error:
                logger.exception("in the background of the engines")
                result = EngineError(f"{type(error).__name__}: {error}")
            self._owner.submit(self._guarded, lambda: done(result))

        threading.Thread(target=run, name="fleet-work", daemon=True).start()

    def _health(self, engine: EngineAddress, generates: bool) -> Any:
        return check_engine(engine, self._config.api_key, self._config.tolerance.timeout, generates=generates)

    def _find(self, address: str) -> EngineAddress:
        return find_engine(address, self._config.api_key, self._config.external.expected)
