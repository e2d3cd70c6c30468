"""The router in front of all engines: the real `sglang-router`, or its successor `smg`, in a process of its own; or one
that runs already.

Its retries and circuit breakers are off: it would repeat requests that timed out and so double generations; the
client is the only one that repeats, after an abort (see `colloid.rollout.client`). Run as a module, this file is that
process: it takes its arguments as JSON from a file that only the user can read, so that the API key shows in no
process list.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colloid.engines.addresses import LOOPBACK, free_port, is_free
from colloid.engines.control import EngineControl
from colloid.engines.launch import REGULAR, WorkerRole
from colloid.engines.process import ModuleProcess
from colloid.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

START_DEADLINE = 60.0
"""Seconds until the router must answer."""
REGISTER_DEADLINE = 60.0
"""Seconds until a registered engine must be healthy in the router's eyes, or one that leaves must be gone."""
BALANCE_ABS_THRESHOLD = 4
"""Requests by which engines may differ (and by half) before a prompt goes to the idlest rather than to the one that has
its beginning in the cache. By itself the router allows 64: prompts that begin alike, as those of a chat template do,
would all stay on one engine, and none would come to an engine that joins.
"""
PORT_ATTEMPTS = 3
"""A free port can be taken between finding and binding it."""


@dataclass(frozen=True)
class RouterConfig:
    """Which router.

    `options` are fields of the router's `RouterArgs` that the user set (`policy`, `request_timeout_secs`, …).
    """

    kind: str = "sglang-router"
    """`sglang-router` or `smg`."""
    host: str = LOOPBACK
    port: int = 0
    """0: any free one. A given port that is taken is a `ConfigError`."""
    options: dict[str, Any] = field(default_factory=dict)
    url: str | None = None
    """Of a router that runs already; then nothing else counts."""


class _Workers:
    """A router's list of engines.

    Args:
        url: of the router.
        api_key: asked from clients, and sent to engines.
    """

    def __init__(self, url: str, api_key: str):
        self.url = url
        self._api_key = api_key
        self._control = EngineControl(url, api_key, timeout=10.0)
        self._registered: list[str] = []

    def register(self, engine_url: str, role: WorkerRole = REGULAR) -> None:
        """Adds an engine, and waits until the router sends it requests.

        Raises:
            EngineError: the router does not take it, or not within the deadline.
        """
        worker: dict[str, Any] = {"url": engine_url, "api_key": self._api_key}
        if role.kind != "regular":  # smg guesses whose API it is, and pairs engines of SGLang and of vLLM in other ways
            worker |= {"worker_type": role.kind, "runtime_type": "sglang"}
        if role.bootstrap_port is not None:
            worker["bootstrap_port"] = role.bootstrap_port
        self._control.post("/workers", worker)
        self._registered.append(engine_url)
        if not self._wait_for(lambda: (self._worker(engine_url) or {}).get("is_healthy")):
            raise EngineError(
                f"the router at {self.url} does not take engine {engine_url} as healthy: {self._workers()}"
            )

    def deregister(self, engine_url: str) -> None:
        """Removes an engine: it is sent no more requests, and those in flight finish.

        Raises:
            EngineError: the router does not answer, or keeps it beyond the deadline.
        """
        worker = self._worker(engine_url)
        if worker is not None:
            self._control.delete(f"/workers/{worker['id']}")
            if not self._wait_for(lambda: self._worker(engine_url) is None):
                raise EngineError(f"the router at {self.url} does not let go of engine {engine_url}")
        self._registered = [url for url in self._registered if url != engine_url]

    def answers(self, timeout: float) -> bool:
        """Whether it lives, asked directly."""
        try:
            EngineControl(self.url, self._api_key, timeout).get("/liveness")
        except EngineError:
            return False
        return True

    def _workers(self) -> list[dict[str, Any]]:
        return self._control.get("/workers").get("workers", [])

    def _worker(self, engine_url: str) -> dict[str, Any] | None:
        return next((worker for worker in self._workers() if worker["url"].rstrip("/") == engine_url), None)

    @staticmethod
    def _wait_for(fact: Any) -> bool:
        deadline = time.monotonic() + REGISTER_DEADLINE
        while time.monotonic() < deadline:
            if fact():
                return True
            time.sleep(0.05)
        return False


class ExternalRouter(_Workers):
    """A router that runs already; at the end it forgets the engines of this run.

    Raises:
        EngineError: it does not answer.
    """

    exit_code = None

    def __init__(self, url: str, api_key: str):
        super().__init__(url, api_key)
        self._control.get("/liveness")

    def restart(self) -> None:
        """Someone else starts it: waits until it answers, and has it forget the engines that it still has.

        Raises:
            EngineError: it does not answer within the deadline.
        """
        if not self._wait_for(lambda: self.answers(5.0)):
            raise EngineError(f"the router at {self.url} does not answer for {REGISTER_DEADLINE:g} s")
        for url in list(self._registered):
            self.deregister(url)

    def stop(self) -> None:
        """Removes the run's engines. A router that is gone by now is reported only."""
        for url in list(self._registered):
            try:
                self.deregister(url)
            except EngineError as error:
                logger.warning("%s", error)


class Router(_Workers):
    """A router of the run's own.

    Args:
        api_key: asked from clients, and sent to engines.
        log_dir: receives `router.log`.
    """

    def __init__(self, config: RouterConfig, api_key: str, log_dir: Path):
        host, port = config.host, config.port
        if port and not is_free(host, port):
            raise ConfigError(
                f"port {port} on {host} (--sglang-router-port) is in use: stop what listens there, choose another "
                "port, or leave the option out to have a free one found. A router that runs already is used with "
                "--sglang-router-ip"
            )
        self._config, self._log_dir = config, log_dir
        for attempt in range(1 if port else PORT_ATTEMPTS):
            chosen = port or free_port(host)
            self._process = _launch(config, chosen, api_key, log_dir)
            super().__init__(f"http://{host}:{chosen}", api_key)
            if self._wait_until_up(last=bool(port) or attempt == PORT_ATTEMPTS - 1):
                return

    def restart(self) -> None:
        """Starts it again, without engines: at its address, or where another listens there by now, at a new one.

        Raises:
            EngineError: it does not come up.
        """
        self._process.stop(0.0)
        host, port = self._config.host, int(self.url.rsplit(":", 1)[1])
        if not is_free(host, port):
            port = free_port(host)
        self._process = _launch(self._config, port, self._api_key, self._log_dir)
        self.url = f"http://{host}:{port}"
        self._control = EngineControl(self.url, self._api_key, timeout=10.0)
        self._registered.clear()
        self._wait_until_up(last=True)

    def _wait_until_up(self, last: bool) -> bool:
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline:
            if self._process.exit_code is not None:
                if not last:
                    return False
                raise EngineError(
                    f"the router at {self.url} ended with {self._process.exit_code}:\n{self._process.log_tail()}"
                )
            try:
                self._control.get("/liveness")
                return True
            except EngineError:
                time.sleep(0.05)
        self._process.stop()
        raise EngineError(f"the router at {self.url} does not answer after {START_DEADLINE:g} s")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exit_code

    def stop(self) -> None:
        self._process.stop()


def _launch(config: RouterConfig, port: int, api_key: str, log_dir: Path) -> ModuleProcess:
    settings = {
        "policy": "cache_aware",
        "balance_abs_threshold": BALANCE_ABS_THRESHOLD,
        "log_level": "warn",
        "prometheus_host": config.host,
        "prometheus_port": free_port(config.host),
        "request_timeout_secs": 7 * 24 * 3600,
        "shutdown_grace_period_secs": 1,
        **config.options,
        "host": config.host,
        "port": port,
        "api_key": api_key,
        "disable_retries": True,
        "disable_circuit_breaker": True,
    }
    path = log_dir / "router.json"
    log_dir.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(settings, file)
    return ModuleProcess("colloid.engines.router", [config.kind, str(path)], log_dir / "router.log")


def main() -> None:
    """Serves until it is ended. The settings file is removed once read."""
    kind, path = sys.argv[1], Path(sys.argv[2])
    settings = json.loads(path.read_text())
    path.unlink()
    if kind == "smg":
        from smg.launch_router import RouterArgs, launch_router
    else:
        from sglang_router.launch_router import RouterArgs, launch_router
    launch_router(RouterArgs(**settings))


if __name__ == "__main__":
    main()
