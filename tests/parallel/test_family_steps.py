"""Every family end to end: weights to the embedded engine, rollouts from it, a GRPO step on them, and again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import cases
from tests.parallel.engine import embedded_engines
from tests.parallel.family_models import VOCAB, make_family
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(900)
NAMES = ["llama3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "moonlight", "glm4_moe_lite"]


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[str, Any]:
    """Of `cases.sync_with_engine`, by name of the family."""
    place = tmp_path_factory.mktemp("families")
    models = {name: make_family(place / name, name) for name in NAMES}
    with embedded_engines(models, place) as urls:
        calls = {
            name: ("sync_with_engine", {"model": models[name], "url": urls[name], "rounds": 2, "vocab": VOCAB})
            for name in NAMES
        }
        return run_ranks(cases.several, 1, tmp_path_factory.mktemp("steps"), timeout=600, calls=calls)[0]


@pytest.mark.parametrize("name", NAMES)
def test_engine_and_trainer_agree_before_and_after_a_step(steps, name):
    step = steps[name]
    assert step["engine"] == step["trainer"]
    assert step["trainer"][0] != step["trainer"][1]
    for metrics in step["metrics"]:
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
