"""Engines for the trainer's tests: real ones, and one that takes weight updates as the contract says and remembers what
it was told.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from colloid.engines.contract import WeightUpdateBucket
from colloid.engines.contract_fields import BadRequest
from colloid.engines.embedded.shared_memory import SharedRings
from tests.parallel.ranks import FORKS, print_to


@contextmanager
def embedded_engines(models: dict[str, Path], directory: Path, *options: str) -> Iterator[dict[str, str]]:
    """A real engine a model, in float32, all started at once; name -> address. The API key is `key`."""
    with ExitStack() as stack:
        engines = {}
        for row, (name, model) in enumerate(models.items()):
            ready, log = directory / f"ready_{row}.json", directory / f"log_{row}"
            command = ["--model-path", str(model), "--host", "127.0.0.1", "--port", "0"]
            command += ["--ready-file", str(ready), "--dtype", "float32", *options]
            if not (model / "tokenizer.json").exists():
                command.append("--skip-tokenizer-init")
            engine = FORKS.Process(target=_serve, args=(command, log))
            engine.start()
            stack.callback(engine.join)
            stack.callback(engine.kill)
            engines[name] = (engine, ready, log)
        deadline = time.monotonic() + 180
        for engine, ready, log in engines.values():
            while not ready.exists():
                assert engine.exitcode is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        yield {name: json.loads(ready.read_text())["url"] for name, (_, ready, _) in engines.items()}


def _serve(command: list[str], log: Path) -> None:
    """In a process of its own."""
    from colloid.engines.embedded.__main__ import main

    print_to(log)
    os.environ["COLLOID_API_KEY"] = "key"
    sys.exit(main(command))


class RecordingEngine:
    """Serves on a free port of loopback until `close`.

    Args:
        fail_at: a path that is answered with status 500.
    """

    def __init__(self, fail_at: str | None = None):
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.updates: list[dict[str, torch.Tensor]] = []
        self.paused = False
        self.problems: list[str] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._rings, self._lock = SharedRings(), threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers["Authorization"] != "Bearer key":
                    engine.problems.append(f"{self.path} without the key")
                failed = self.path == fail_at
                if not failed:
                    with engine._lock:
                        engine.take(self.path, payload)
                self.send_response(500 if failed else 200)
                self.end_headers()
                self.wfile.write(b"out of memory" if failed else b"{}")

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()

    def take(self, path: str, payload: dict[str, Any]) -> None:
        self.calls.append((path, payload))
        if path == "/pause_generation":
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif not self.paused:
            self.problems.append(f"{path} while running")
        if path == "/begin_weight_update":
            self._tensors = {}
        elif path == "/update_weights_from_tensor":
            self._copy_out(payload)
        elif path == "/end_weight_update":
            if "num_tensors" not in payload:  # given up
                return
            if payload["num_tensors"] != len(self._tensors):
                self.problems.append(f"{len(self._tensors)} tensors where {payload['num_tensors']} were announced")
            self.updates.append(self._tensors)

    def _copy_out(self, payload: dict[str, Any]) -> None:
        path = Path(payload["shared_memory"]["path"])
        if path.stat().st_mode & 0o777 != 0o600:
            self.problems.append(f"{path} has the mode {path.stat().st_mode:o}")
        try:
            self._tensors.update(self._rings.tensors(WeightUpdateBucket.from_json(payload), lambda _name: None))
        except BadRequest as error:
            self.problems.append(str(error))
