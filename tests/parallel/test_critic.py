"""The critic against a plain Hugging Face model with a linear head; that all layouts are as one rank, see
`test_critic_layouts.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel import critic_cases
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    """With a projection onto the vocabulary of its own, which the critic leaves aside."""
    return tiny_model_dir("llama", tied=False)


@pytest.fixture(scope="module")
def expected(model) -> dict[str, Any]:
    return critic_cases.of_hugging_face(model)


@pytest.fixture(scope="module")
def found(model, tiny_model_dir, tmp_path_factory) -> dict[str, Any]:
    inputs = {"model": model, "reference": tiny_model_dir("llama", tied=False, seed=1)}
    return run_ranks(critic_cases.one_rank, 1, tmp_path_factory.mktemp("rank"), **inputs)[0]


def test_values_and_gradients_are_those_of_a_plain_model(found, expected):
    for step in found["step"].values():
        assert step["values"].keys() == expected["values"].keys()
        for key, wanted in expected["values"].items():
            np.testing.assert_allclose(step["values"][key], wanted, rtol=0, atol=1e-5)
        for name in ("head", "embedding", "norm"):
            wanted = expected[name]
            scale = np.abs(wanted).max()
            assert scale > 0
            np.testing.assert_allclose(step[name][: len(wanted)], wanted, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_metrics_are_those_of_the_formulas_whatever_the_micro_batches(found, expected):
    for step in found["step"].values():
        metrics = step["metrics"]
        assert metrics["train/value_loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert metrics["train/explained_variance"] == pytest.approx(expected["explained"], rel=1e-5)
        assert 0 < metrics["train/value_clipfrac"] < 1
        assert metrics["train/value_clipfrac"] == pytest.approx(found["step"][1]["metrics"]["train/value_clipfrac"])
        assert metrics["train/critic_grad_norm"] > 0 and metrics["train/critic_lr"] == 0


def test_explained_variance_rises_from_nothing(found):
    explained = found["explained"]
    assert explained[0] == pytest.approx(0.0, abs=1e-9), "the head starts at 0, so that it explains nothing"
    assert explained[-1] > 0.5


def test_only_the_critic_learns_at_first(found):
    joint = found["with policy"]
    assert joint["untouched"] and not [name for name in joint["only critic"] if name.startswith("train/")]
    assert np.array_equal(joint["early returns"], joint["returns"]), "the policy has not moved"
    assert np.isfinite(joint["returns"]).all() and joint["returns"].any()
    assert joint["metrics"]["train/pg_loss"] != 0
