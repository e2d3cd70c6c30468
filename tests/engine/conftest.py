"""Shared by the engine's tests: small models, and one server process for all tests that speak HTTP."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from tests.engine.models import VARIANTS, make_model

API_KEY = "key of the tests"
START_SECONDS = 60


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory):
    """{variant: directory} of all small models."""
    base = tmp_path_factory.mktemp("models")
    return {variant: make_model(variant, base / variant) for variant in VARIANTS}


@dataclass
class Server:
    """A running engine process and the calls that tests make to it."""

    url: str
    process: subprocess.Popen
    model_path: Path

    def post(self, path: str, body=None, *, status: int = 200, data: bytes | None = None, timeout: float = 30):
        payload = {"data": data} if data is not None else {"json": {} if body is None else body}
        answer = requests.post(self.url + path, headers=self.headers, timeout=timeout, **payload)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text[:500]}"
        return answer.json()

    def get(self, path: str, *, status: int = 200):
        answer = requests.get(self.url + path, headers=self.headers, timeout=30)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text[:500]}"
        return answer.json()

    def generate(self, prompt=(1, 2, 3), *, status: int = 200, body=None, **params):
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        request = {**source, "sampling_params": params, "return_logprob": True, **(body or {})}
        return self.post("/generate", request, status=status)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {API_KEY}"}

    @property
    def load(self) -> dict:
        return self.get("/server_info")["internal_states"][0]

    def wait_until(self, fact, what: str) -> None:
        deadline = time.monotonic() + 20
        while not fact(self.load):
            assert time.monotonic() < deadline, f"waited 20 s until {what}: {self.load}"
            time.sleep(0.005)


@pytest.fixture(scope="session")
def server(tiny_model_dir, tmp_path_factory):
    model_path = tiny_model_dir("qwen3", max_position=4096)
    ready = tmp_path_factory.mktemp("server") / "ready.json"
    arguments = ["--model-path", str(model_path), "--ready-file", str(ready), "--max-total-tokens", "16384"]
    options = ["--enable-deterministic-inference", "--served-model-name", "tiny", "--max-running-requests", "16"]
    environment = {**os.environ, "COLLOID_API_KEY": API_KEY}
    process = subprocess.Popen(
        [sys.executable, "-m", "colloid.engines.embedded", *arguments, *options], env=environment
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None, f"the engine ended with {process.returncode}"
            assert time.monotonic() < deadline, f"the engine was not ready within {START_SECONDS} s"
            time.sleep(0.05)
        facts = json.loads(ready.read_text())
        assert facts["pid"] == process.pid
        yield Server(facts["url"], process, Path(model_path))
        assert process.poll() is None, "the engine died during the tests"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
