"""The rollout engines of a run and the router in front of them.

Life: engine processes start, each on a port of its own -> each serves -> the router registers them -> at the end an
external router forgets them, and all are stopped together; and all die with this process, however it ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from colloid.engines.control import EngineAddress
from colloid.engines.launch import EngineConfig, EngineHandle, Launch, launch_engine
from colloid.engines.router import ExternalRouter, Router, RouterConfig
from colloid.errors import EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FleetConfig:
    """What the fleet needs to know: one `EngineConfig` an engine, all with the same key."""

    engines: tuple[EngineConfig, ...]
    router: RouterConfig = field(default_factory=RouterConfig)


class Fleet:
    """Starts engines and router; `addresses` and `router_url` are valid after `start`.

    Args:
        launch: starts one engine; those on another node have a `launch` of their own.
    """

    def __init__(self, config: FleetConfig, launch: Launch = launch_engine):
        self._config, self._launch = config, launch
        self._engines: list[EngineHandle] = []
        self._router: Router | ExternalRouter | None = None
        self.addresses: list[EngineAddress] = []

    @property
    def router_url(self) -> str:
        assert self._router is not None, "start comes first"
        return self._router.url

    @property
    def pids(self) -> list[int]:
        """The processes of the fleet, engines first."""
        engines = [engine.pid for engine in self._engines]
        return engines + ([self._router.pid] if isinstance(self._router, Router) else [])

    def start(self) -> None:
        """Returns when every engine serves and is known to the router.

        Raises:
            EngineError: an engine ended, or did not serve within its deadline; with the end of its log. Or the
                external router does not answer.
        """
        config = self._config
        first = config.engines[0]
        try:
            if config.router.url:  # before any model is loaded
                self._router = ExternalRouter(config.router.url, first.api_key)
            for index, engine in enumerate(config.engines):
                self._engines.append(self._launch(engine, f"engine_{index}", index))
            if self._router is None:
                self._router = Router(config.router, first.api_key, first.log_dir)
            for engine, handle in zip(config.engines, self._engines, strict=True):
                url = handle.wait_until_ready()
                self._router.register(url, engine.role)
                self.addresses.append(EngineAddress(url, engine.kind))
                logger.info("engine %s serves (pid %d)", url, handle.pid)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises `EngineError` where an engine or the router has ended."""
        for engine, address in zip(self._engines, self.addresses, strict=True):
            if engine.exit_code is not None:
                raise EngineError(f"engine {address.url} (pid {engine.pid}) {engine.how_it_ended()}")
        if self._router is not None and self._router.exit_code is not None:
            raise EngineError(f"the router {self._router.url} ended with {self._router.exit_code}")

    def stop(self) -> None:
        """Ends the router, then the engines."""
        if self._router is not None:
            self._router.stop()
        for engine in self._engines:
            engine.terminate()
        for engine in self._engines:
            engine.stop()


class FrozenEngine:
    """One engine by itself: behind no router, and its weights never change.

    Args:
        name: of its log file.
    """

    def __init__(self, config: EngineConfig, name: str, launch: Launch = launch_engine):
        self._engine = launch(config, name, 0)

    def wait_until_ready(self) -> str:
        """Its address.

        Raises:
            EngineError: as `Fleet.start`.
        """
        url = self._engine.wait_until_ready()
        logger.info("engine %s serves (pid %d)", url, self.pid)
        return url

    @property
    def pid(self) -> int:
        return self._engine.pid

    def stop(self) -> None:
        self._engine.stop()
