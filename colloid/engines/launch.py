"""Starting one engine of a kind, and knowing when it serves.

Two kinds speak the same HTTP: the embedded one, a module of this package that says in a file where it serves, and
SGLang, which is told its port and asked for its health.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from colloid.config.placement import Place
from colloid.engines import sglang
from colloid.engines.addresses import LOOPBACK
from colloid.engines.process import ModuleProcess
from colloid.errors import EngineError

START_DEADLINE = {"embedded": 600.0, "sglang": 1700.0}
"""Seconds until an engine must have loaded its model and serve."""


@dataclass(frozen=True)
class WorkerRole:
    """What a router sends to an engine."""

    kind: str = "regular"
    """`regular`: whole requests; `prefill`: their prompts; `decode`: what follows, from the cache of the former."""
    bootstrap_port: int | None = None
    """Where an engine that prefills hands over its cache."""


REGULAR = WorkerRole()


@dataclass(frozen=True)
class EnginePart:
    """The process on one of an engine's nodes; that of node 0 serves."""

    number: int
    count: int
    meeting_point: str | None = None
    """`address:port` on node 0, where all of them meet."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine needs to know.

    `options` are command-line options of the engine without the leading dashes (`{"dtype": "float32"}`); True stands
    for a flag without a value, a list for several values.
    """

    model_path: str
    log_dir: Path
    api_key: str = field(repr=False)
    host: str = LOOPBACK
    kind: str = "embedded"
    options: dict[str, Any] = field(default_factory=dict)
    python: str | None = None
    """The interpreter that has SGLang; None: this process's own."""
    gpus: tuple[int, ...] | None = None
    """Numbers of its GPUs on its host; None: it is on the CPU."""
    place: Place = ()
    """Its slots, for whoever starts it on the node that it is for."""
    part: EnginePart | None = None
    """Where it is one of several processes on as many nodes."""
    role: WorkerRole = REGULAR


class EngineHandle(Protocol):
    """An engine that this run has started, here or on another node."""

    is_here: bool
    """Whether its process is on this host: `pid` means nothing elsewhere."""

    @property
    def pid(self) -> int:
        """On its own host."""

    @property
    def log_path(self) -> Path:
        """On its own host."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N where signal N ended it."""

    def wait_until_ready(self) -> str:
        """Its address, once it serves.

        Raises:
            EngineError: the engine ended, or its deadline has passed.
        """

    def how_it_ended(self, when: str = "") -> str:
        """`ended with …` and the end of its log."""

    def terminate(self) -> None:
        """Asks it to end. Returns at once."""

    def stop(self, grace: float = 5.0) -> None:
        """Ends it, after `grace` seconds by force. Returns when it has ended, and what it started with it."""


Launch = Callable[[EngineConfig, str, int], EngineHandle]
"""`(config, name, index)` -> the engine, which is being started: `name` of its log file, `index` among the engines."""


class LaunchedEngine:
    """An engine process on this host: an `EngineHandle`.

    Args:
        poll: its address once it serves, else None.
        deadline: seconds that it may take until then.
        api_key: kept out of errors, as SGLang's log has it.
    """

    is_here = True

    def __init__(self, process: ModuleProcess, poll: Callable[[], str | None], deadline: float, api_key: str):
        self.process = process
        self._poll, self._seconds, self._api_key = poll, deadline, api_key
        self._deadline = time.monotonic() + deadline

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log_path(self) -> Path:
        return self.process.log_path

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code

    def terminate(self) -> None:
        self.process.terminate()

    def stop(self, grace: float = 5.0) -> None:
        self.process.stop(grace)

    def wait_until_ready(self) -> str:
        """Its address, once it serves.

        Raises:
            EngineError: the engine ended, or the deadline has passed.
        """
        process = self.process
        while (url := self._poll()) is None:
            if process.exit_code is not None:
                raise EngineError(f"an engine {self.how_it_ended('before it served')}")
            if time.monotonic() > self._deadline:
                raise EngineError(
                    f"an engine (pid {process.pid}) does not serve after {self._seconds:g} s; its log: "
                    f"{process.log_path}"
                )
            time.sleep(0.05)
        return url

    def how_it_ended(self, when: str = "") -> str:
        """`ended with …` and the end of its log."""
        process = self.process
        log = process.log_tail().replace(self._api_key, "***")
        code = f"{process.exit_code}{' ' if when else ''}{when}"
        return f"ended with {code}; the end of its log, {process.log_path}:\n{log}"


def launch_engine(config: EngineConfig, name: str, index: int = 0) -> LaunchedEngine:
    """Starts an engine.

    Args:
        name: of its log file.
        index: its number among the engines of the run.
    """
    config.log_dir.mkdir(parents=True, exist_ok=True)
    launch = {"embedded": _launch_embedded, "sglang": _launch_sglang}[config.kind]
    return launch(config, name, index)


def command_line(options: dict[str, Any]) -> list[str]:
    """`{"dtype": "float32", "flag": True, "ids": [1, 2]}` -> `--dtype float32 --flag --ids 1 2`."""
    arguments: list[str] = []
    for option, value in options.items():
        values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        arguments += [f"--{option}", *(json.dumps(item) if isinstance(item, dict) else str(item) for item in values)]
    return arguments


def _launch_embedded(config: EngineConfig, name: str, index: int) -> LaunchedEngine:
    ready_file = config.log_dir / f"{name}.ready.json"
    ready_file.unlink(missing_ok=True)
    options = {
        "model-path": config.model_path,
        "host": config.host,
        "port": 0,
        "ready-file": str(ready_file),
        **config.options,
    }
    process = ModuleProcess(
        "colloid.engines.embedded",
        command_line(options),
        config.log_dir / f"{name}.log",
        {"COLLOID_API_KEY": config.api_key, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )

    def poll() -> str | None:
        return json.loads(ready_file.read_text())["url"].rstrip("/") if ready_file.exists() else None

    return LaunchedEngine(process, poll, START_DEADLINE["embedded"], config.api_key)


def port_share(config: EngineConfig, index: int) -> int:
    """Which share of its host's ports (`lasting_port`) an engine's process has: that of its first slot there, which no
    other engine has, of other models neither. The first share is for all that is no engine.
    """
    if config.gpus:
        return 1 + config.gpus[0]
    number = config.part.number if config.part is not None else 0
    return 1 + (config.place[number].slots[0] if config.place else index)


def _several_nodes(config: EngineConfig) -> sglang.SeveralNodes | None:
    part = config.part
    return sglang.SeveralNodes(part.number, part.count, part.meeting_point or "") if part else None


def _launch_sglang(config: EngineConfig, name: str, index: int) -> LaunchedEngine:
    share = port_share(config, index)
    server = sglang.plan(config.options, config.model_path, config.host, config.gpus, _several_nodes(config), share)
    log_path = config.log_dir / f"{name}.log"
    log_path.touch(mode=0o600)  # SGLang prints its options, the key among them
    key_file = sglang.write_key(config.log_dir / f"{name}.key.yaml", config.api_key)
    process = ModuleProcess(
        sglang.MODULE,
        ["--config", str(key_file), *command_line(server.options)],
        log_path,
        server.environment,
        python=config.python,
    )

    def poll() -> str | None:
        url = sglang.poll(server.url, config.api_key)
        if url is not None or process.exit_code is not None:
            key_file.unlink(missing_ok=True)  # it has been read, or never will be
        return url

    return LaunchedEngine(process, poll, START_DEADLINE["sglang"], config.api_key)
