"""A pool of engines that are made up, in time that a test moves by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from colloid.engines.control import EngineAddress
from colloid.engines.health import Health, Verdict
from colloid.engines.launch import EngineConfig
from colloid.engines.members import PoolView, Services, State, Tolerance
from colloid.engines.pool import Pool
from colloid.engines.router_watch import RouterWatch
from colloid.errors import EngineError

TOLERANCE = Tolerance(interval=10.0, timeout=5.0, first_wait=2.0)
HEALTHY = Health(Verdict.HEALTHY)


@dataclass
class Handle:
    """An engine that is whatever the test says."""

    url: str
    pid: int = 0
    log_path: Path = Path("log")
    exit_code: int | None = None
    fails: bool = False
    stopped: bool = False
    is_here: bool = True

    def wait_until_ready(self) -> str:
        if self.fails:
            raise EngineError(f"{self.url} does not start; the end of its log: out of memory")
        return self.url

    def how_it_ended(self, when: str = "") -> str:
        return f"ended with {self.exit_code}"

    def terminate(self) -> None:
        self.stopped = True

    def stop(self, grace: float = 5.0) -> None:
        self.stopped = True


@dataclass
class Router:
    url: str = "http://router"
    exit_code: int | None = None
    engines: list[str] = field(default_factory=list)
    silent: bool = False
    failures: int = 0
    slow: str = ""
    """An engine that it has registered without knowing whether it is healthy."""
    stopped: bool = False

    def register(self, engine_url, role=None):
        self.engines.append(engine_url)
        if engine_url == self.slow:
            raise EngineError(f"the router does not take engine {engine_url} as healthy")

    def deregister(self, engine_url):
        self.engines.remove(engine_url)

    def answers(self, timeout):
        return not self.silent

    def restart(self):
        if self.failures:
            self.failures -= 1
            raise EngineError("no port")
        self.exit_code, self.silent, self.stopped, self.engines = None, False, False, []

    def stop(self):
        self.stopped = True


class World:
    """Everything around a pool. What it runs in the background stands in `work` until `run`."""

    def __init__(
        self, tolerance: Tolerance | None = TOLERANCE, engines: int = 2, external: tuple[str, ...] = (), **options
    ):
        self.now = 100.0
        self.router = Router()
        self.handles: list[Handle] = []
        self.work: list = []
        self.health: dict[str, Health] = {}
        self.checked: list[str] = []
        self.running: dict[str, int] = {}
        self.missing: set[str] = set()
        self.views: list[PoolView] = []
        self.failing_starts = 0
        self.pool = Pool(
            Services(
                launch=self._launch,
                router=self.router,
                background=lambda work, done: self.work.append((work, done)),
                check=self._check,
                find=self._find,
                running=self._running,
                changed=self.views.append,
                clock=lambda: self.now,
            ),
            tolerance,
            **options,
        )
        for place in range(engines):
            handle = self._launch(CONFIG, "", place)
            self.pool.ready(self.pool.add(place, CONFIG, handle), handle.url)
        for address in external:
            self.pool.ready(self.pool.add_external(address), address)
        self.pool.admit([member.name for member in self.pool.members])
        self.watch = RouterWatch(
            self.router, self.pool, lambda work, done: self.work.append((work, done)), lambda: self.now
        )

    def run(self) -> None:
        """All work that stands in the background, and what follows from it."""
        while self.work:
            work, done = self.work.pop(0)
            try:
                result = work()
            except EngineError as error:
                result = error
            done(result)

    def pass_time(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.watch.step()
        self.pool.step()
        self.run()

    def urls(self, *states: State) -> list[str]:
        return [member.url for member in self.pool.of(*states)]

    @property
    def serving(self) -> list[str]:
        """As clients see it."""
        return [engine.url for engine in self.views[-1].serving]

    def _launch(self, config, name, index) -> Handle:
        handle = Handle(f"http://engine{index}-{len(self.handles)}", len(self.handles), fails=self.failing_starts > 0)
        self.failing_starts -= 1
        self.handles.append(handle)
        return handle

    def _check(self, engine: EngineAddress, generates: bool) -> Health:
        self.checked.append(engine.url)
        return self.health.get(engine.url, HEALTHY)

    def _running(self, engine: EngineAddress) -> int:
        if engine.url in self.missing:
            raise EngineError(f"{engine.url}: no answer")
        return self.running.get(engine.url, 0)

    def _find(self, address: str) -> EngineAddress:
        if address in self.missing:
            raise EngineError(f"{address}: nobody there")
        return EngineAddress(address)


CONFIG = EngineConfig("model", Path("logs"), "key")
ONE, TWO, THREE = (f"http://host:{port}" for port in (1, 2, 3))
"""Addresses of engines that run already."""
