"""The router: the real `sglang-router` in a process of its own, in front of all engines.

Its retries and circuit breakers are off: it would repeat requests that timed out and so double generations; the
client is the only one that repeats, after an abort (see `colloid.rollout.client`). Run as a module, this file is that
process: it takes its arguments as JSON from a file that only the user can read, so that the API key shows in no
process list.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from colloid.engines.control import EngineControl
from colloid.engines.process import ModuleProcess
from colloid.errors import ConfigError, EngineError

START_DEADLINE = 60.0
"""Seconds until the router must answer."""
REGISTER_DEADLINE = 60.0
"""Seconds until a registered engine must be healthy in the router's eyes."""
PORT_ATTEMPTS = 3
"""A free port can be taken between finding and binding it."""


class Router:
    """A running router.

    Args:
        host: interface to bind.
        port: 0: any free one. A given port that is taken is a `ConfigError`.
        api_key: asked from clients, and sent to engines.
        options: `sglang_router.RouterArgs` fields that the user set (`policy`, `request_timeout_secs`, …).
        log_dir: receives `router.log`.
    """

    def __init__(self, host: str, port: int, api_key: str, options: dict[str, Any], log_dir: Path):
        self._api_key = api_key
        if port and not _is_free(host, port):
            raise ConfigError(
                f"port {port} on {host} (--sglang-router-port) is in use: stop what listens there, choose another "
                "port, or leave the option out to have a free one found"
            )
        for attempt in range(1 if port else PORT_ATTEMPTS):
            chosen = port or free_port(host)
            self._process = _launch(host, chosen, api_key, options, log_dir)
            self.url = f"http://{host}:{chosen}"
            self._control = EngineControl(self.url, api_key, timeout=10.0)
            if self._wait_until_up(last=bool(port) or attempt == PORT_ATTEMPTS - 1):
                return

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

    def register(self, engine_url: str) -> None:
        """Adds an engine, and waits until the router sends it requests."""
        self._control.post("/workers", {"url": engine_url, "api_key": self._api_key})
        deadline = time.monotonic() + REGISTER_DEADLINE
        while time.monotonic() < deadline:
            workers = self._control.get("/workers").get("workers", [])
            if any(worker["url"].rstrip("/") == engine_url and worker["is_healthy"] for worker in workers):
                return
            time.sleep(0.05)
        raise EngineError(f"the router at {self.url} does not take engine {engine_url} as healthy: {workers}")

    def stop(self) -> None:
        self._process.stop()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _launch(host: str, port: int, api_key: str, options: dict[str, Any], log_dir: Path) -> ModuleProcess:
    settings = {
        "policy": "cache_aware",
        "log_level": "warn",
        "prometheus_host": host,
        "prometheus_port": free_port(host),
        "request_timeout_secs": 7 * 24 * 3600,
        "shutdown_grace_period_secs": 1,
        **options,
        "host": host,
        "port": port,
        "api_key": api_key,
        "disable_retries": True,
        "disable_circuit_breaker": True,
    }
    path = log_dir / "router.json"
    log_dir.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(settings, file)
    return ModuleProcess("colloid.engines.router", [str(path)], log_dir / "router.log")


def main() -> None:
    """Serves until it is ended. The settings file is removed once read."""
    from sglang_router.launch_router import RouterArgs, launch_router

    path = Path(sys.argv[1])
    settings = json.loads(path.read_text())
    path.unlink()
    launch_router(RouterArgs(**settings))


if __name__ == "__main__":
    main()
