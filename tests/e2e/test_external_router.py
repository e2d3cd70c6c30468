"""A run whose engines register at a router that runs already."""

import importlib.util

import pytest

from colloid.engines.control import EngineControl
from colloid.engines.router import Router, RouterConfig
from tests.e2e.running import metrics_of, run_training, tiny_arguments, write_sums

KEY = "the key of the router"
KIND = "sglang-router" if importlib.util.find_spec("smg") is None else "smg"


@pytest.mark.timeout(500)
def test_engines_join_a_router_that_runs_already_and_leave_it_at_the_end(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.setenv("COLLOID_API_KEY", KEY)
    router = Router(RouterConfig(kind=KIND), KEY, tmp_path)
    try:
        ended = run_training(
            tmp_path,
            *tiny_arguments(tiny_model_dir(), write_sums(tmp_path / "data.jsonl", 4)),
            *("--num-rollout", 1, "--rollout-num-gpus", 2, "--run-name", "run"),
            *("--sglang-router-ip", "127.0.0.1", "--sglang-router-port", router.url.rsplit(":", 1)[1]),
            timeout=450,
        )
        assert ended.code == 0, ended.output[-5000:]
        assert metrics_of(tmp_path / "outputs" / "run")
        assert EngineControl(router.url, KEY).get("/workers")["workers"] == []
        assert router.exit_code is None
    finally:
        router.stop()
