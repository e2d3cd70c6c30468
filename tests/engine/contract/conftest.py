"""One tiny model behind each kind of engine: the embedded one always, the real SGLang where it is installed."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from colloid.config.sglang_installed import find_python
from colloid.engines.control import EngineControl
from colloid.engines.launch import EngineConfig, launch_engine
from colloid.engines.router import Router, RouterConfig
from colloid.rollout.direct import not_passed_on

KEY = "the key of the contract"
SGLANG = find_python(Namespace(rollout_engine_python=None))
OPTIONS = {
    "embedded": {"dtype": "float32", "max-total-tokens": 16384, "max-running-requests": 16},
    "sglang": {"dtype": "float32", "max-total-tokens": 16384, "max-running-requests": 16, "tp-size": 1},
}
WITHOUT_SMG = pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="needs smg: pip install smg")
WITHOUT = "needs SGLang: bash scripts/install_sglang_cpu.sh"


class Background(threading.Thread):
    """A request under way; `result` is its answer."""

    def __init__(self, engine: Engine, body: dict[str, Any]):
        super().__init__(daemon=True)
        self._engine, self._body = engine, body
        self.start()

    def run(self) -> None:
        self._answer = self._engine.post("/generate", self._body)

    @property
    def result(self) -> Any:
        self.join(60)
        assert not self.is_alive(), "the request was not answered within 60 s"
        return self._answer


@dataclass
class Engine:
    """A running engine, and the model that it was started with."""

    kind: str
    url: str
    model_dir: Path
    pid: int

    @cached_property
    def model(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.model_dir)

    @property
    def control(self) -> EngineControl:
        return EngineControl(self.url, KEY)

    @cached_property
    def name(self) -> str:
        """Of the model, as it is listed."""
        return self.call("GET", "/v1/models").json()["data"][0]["id"]

    def call(self, method: str, path: str, body: Any = None, *, key: str | None = KEY, **options) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return requests.request(method, self._at(path, body) + path, json=body, headers=headers, timeout=60, **options)

    def _at(self, path: str, body: Any) -> str:
        return self.url

    def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        answer = self.call("POST", path, {} if body is None else body)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text[:1000]}"
        return answer.json() if answer.headers.get("Content-Type", "").startswith("application/json") else {}

    def generate(self, prompt: str | list, body: dict[str, Any] | None = None, **params: Any) -> Any:
        source = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        return self.post("/generate", {**source, "sampling_params": params, "return_logprob": True, **(body or {})})

    def long(self, rid: str, **body: Any) -> Background:
        """A request of 4,000 tokens that runs when this returns."""
        params = {"max_new_tokens": 4000, "ignore_eos": True}
        request = Background(
            self, {"input_ids": [5, 6, 7], "sampling_params": params, "rid": rid, "return_logprob": True, **body}
        )
        before = self.num_generated
        deadline = time.monotonic() + 30
        while self.num_generated < before + 3:
            assert time.monotonic() < deadline, "the request does not run after 30 s"
            time.sleep(0.05)
        return request

    @property
    def num_generated(self) -> int:
        """Tokens that have been computed so far, from the engine's metrics."""
        text = self.call("GET", "/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("sglang:realtime_tokens_total")]
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)

    def log_probs(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """What transformers says of the output's tokens."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + output])).logits[0].float()
        return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]


@dataclass
class BehindRouter(Engine):
    """The same behind a router, as colloid's client asks it: what the router would drop goes to the engine itself."""

    engine_url: str = ""

    def _at(self, path: str, body: Any) -> str:
        return self.engine_url if path == "/generate" and not_passed_on(body or {}) else self.url


def output_log_probs(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


@pytest.fixture(
    scope="session",
    params=["embedded", pytest.param("sglang", marks=pytest.mark.skipif(SGLANG is None, reason=WITHOUT))],
)
def engine(request, tiny_model_dir, tmp_path_factory):
    model_dir = tiny_model_dir("qwen3", max_position=4096, seed=3)
    options = OPTIONS[request.param]
    if request.param == "embedded":
        options = options | {"weights-dir": tempfile.gettempdir()}
    config = EngineConfig(
        str(model_dir),
        tmp_path_factory.mktemp("engine"),
        KEY,
        kind=request.param,
        options=options,
        python=SGLANG,
    )
    launched = launch_engine(config, "engine")
    try:
        yield Engine(request.param, launched.wait_until_ready(), model_dir, launched.pid)
        assert launched.process.exit_code is None, f"the engine died: {launched.process.log_tail()}"
    finally:
        launched.process.stop()


@pytest.fixture(scope="session", params=["itself", "sglang-router", pytest.param("smg", marks=WITHOUT_SMG)])
def front(request, engine, tmp_path_factory):
    """The engine as a client sees it: at its own address, and behind each router."""
    if request.param == "itself":
        yield engine
        return
    router = Router(RouterConfig(kind=request.param), KEY, tmp_path_factory.mktemp("router"))
    try:
        router.register(engine.url)
        yield BehindRouter(engine.kind, router.url, engine.model_dir, engine.pid, engine.url)
    finally:
        router.stop()


@pytest.fixture
def weights_place():
    """A directory that engines may read weights from."""
    with tempfile.TemporaryDirectory(prefix="weights-") as place:
        yield Path(place)


@pytest.fixture(autouse=True)
def _runs_again(engine):
    """Whatever a test paused goes on after it."""
    yield
    engine.post("/abort_request", {"abort_all": True})
    engine.post("/continue_generation")
