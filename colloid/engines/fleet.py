"""The rollout engines of a run and the router in front of them.

Life: engine processes start, each on a port that the kernel chose -> each reports its address through a file -> the
router registers them -> all are stopped together; and all die with this process, however it ends.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colloid.engines.control import EngineAddress
from colloid.engines.process import ModuleProcess
from colloid.engines.router import Router
from colloid.errors import EngineError

logger = logging.getLogger(__name__)

START_DEADLINE = 600.0
"""Seconds until an engine must have loaded its model and serve."""


@dataclass(frozen=True)
class FleetConfig:
    """What the fleet needs to know.

    `engine_options` are command-line options of the engine without the leading dashes (`{"dtype": "float32"}`);
    True stands for a flag without a value.
    """

    num_engines: int
    model_path: str
    log_dir: Path
    api_key: str
    host: str = "127.0.0.1"
    engine_options: dict[str, Any] = field(default_factory=dict)
    router_port: int = 0
    router_options: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """Starts engines and router; `addresses` and `router_url` are valid after `start`."""

    def __init__(self, config: FleetConfig):
        self._config = config
        self._engines: list[ModuleProcess] = []
        self._router: Router | None = None
        self.addresses: list[EngineAddress] = []

    @property
    def router_url(self) -> str:
        assert self._router is not None, "start comes first"
        return self._router.url

    @property
    def pids(self) -> list[int]:
        """The processes of the fleet, engines first."""
        return [engine.pid for engine in self._engines] + ([self._router.pid] if self._router else [])

    def start(self) -> None:
        """Returns when every engine serves and is known to the router.

        Raises:
            EngineError: an engine ended, or did not serve within its deadline; with the end of its log.
        """
        config = self._config
        ready_files = [config.log_dir / f"engine_{index}.ready.json" for index in range(config.num_engines)]
        for index, ready_file in enumerate(ready_files):
            self._engines.append(launch_engine(config, f"engine_{index}", ready_file))
        try:
            self._router = Router(
                config.host, config.router_port, config.api_key, config.router_options, config.log_dir
            )
            deadline = time.monotonic() + START_DEADLINE
            for engine, ready_file in zip(self._engines, ready_files, strict=True):
                url = wait_until_ready(engine, ready_file, deadline)
                self._router.register(url)
                self.addresses.append(EngineAddress(url))
                logger.info("engine %s serves (pid %d)", url, engine.pid)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises `EngineError` where an engine or the router has ended."""
        for engine, address in zip(self._engines, self.addresses, strict=True):
            if engine.exit_code is not None:
                raise EngineError(
                    f"engine {address.url} (pid {engine.pid}) ended with {engine.exit_code}; the end of its log, "
                    f"{engine.log_path}:\n{engine.log_tail()}"
                )
        if self._router is not None and self._router.exit_code is not None:
            raise EngineError(f"the router {self._router.url} ended with {self._router.exit_code}")

    def stop(self) -> None:
        """Ends the router, then the engines."""
        if self._router is not None:
            self._router.stop()
        for engine in self._engines:
            engine.stop()


class FrozenEngine:
    """One engine by itself: behind no router, and its weights never change. Of the fleet's configuration it reads what
    concerns an engine.

    Args:
        name: of its log file.
    """

    def __init__(self, config: FleetConfig, name: str):
        self._ready_file = config.log_dir / f"{name}.ready.json"
        self._process = launch_engine(config, name, self._ready_file)
        self._deadline = time.monotonic() + START_DEADLINE

    def wait_until_ready(self) -> str:
        """Its address.

        Raises:
            EngineError: as `Fleet.start`.
        """
        url = wait_until_ready(self._process, self._ready_file, self._deadline)
        logger.info("engine %s serves (pid %d)", url, self._process.pid)
        return url

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.stop()


def launch_engine(config: FleetConfig, name: str, ready_file: Path) -> ModuleProcess:
    """Starts an engine, which writes `ready_file` once it serves."""
    ready_file.parent.mkdir(parents=True, exist_ok=True)
    ready_file.unlink(missing_ok=True)
    options = {
        "model-path": config.model_path,
        "host": config.host,
        "port": 0,
        "ready-file": str(ready_file),
        **config.engine_options,
    }
    arguments = []
    for option, value in options.items():
        arguments += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return ModuleProcess(
        "colloid.engines.embedded",
        arguments,
        config.log_dir / f"{name}.log",
        {"COLLOID_API_KEY": config.api_key, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def wait_until_ready(engine: ModuleProcess, ready_file: Path, deadline: float) -> str:
    """The address in the ready file, once it is there.

    Raises:
        EngineError: the engine ended, or the deadline has passed.
    """
    while not ready_file.exists():
        if engine.exit_code is not None:
            raise EngineError(
                f"an engine ended with {engine.exit_code} before it served; the end of its log, {engine.log_path}:\n"
                f"{engine.log_tail()}"
            )
        if time.monotonic() > deadline:
            raise EngineError(
                f"an engine (pid {engine.pid}) does not serve after {START_DEADLINE:g} s; its log: {engine.log_path}"
            )
        time.sleep(0.05)
    return json.loads(ready_file.read_text())["url"].rstrip("/")
