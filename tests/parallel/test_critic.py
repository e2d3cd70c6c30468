"""The critic against a plain Hugging Face model with a linear head, on one rank and on two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel import critic_cases
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(150)
SIZES = {1: [1, 8], 2: [1, 2]}


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    """With a projection onto the vocabulary of its own, which the critic leaves aside."""
    return tiny_model_dir("llama", tied=False)


@pytest.fixture(scope="module")
def expected(model) -> dict[str, Any]:
    return critic_cases.of_hugging_face(model)


@pytest.fixture(scope="module", params=list(SIZES), ids="{} ranks".format)
def ranks(request, model, tmp_path_factory) -> list[dict[int, Any]]:
    place = tmp_path_factory.mktemp("ranks")
    inputs = {"model": model, "micro_batches": SIZES[request.param]}
    return run_ranks(critic_cases.one_step, request.param, place, **inputs)


def test_values_and_gradients_are_those_of_a_plain_model(ranks, expected):
    for size in ranks[0]:
        values = {key: part for rank in ranks for key, part in rank[size]["values"].items()}
        assert values.keys() == expected["values"].keys()
        for key, wanted in expected["values"].items():
            np.testing.assert_allclose(values[key], wanted, rtol=0, atol=1e-5)
        for name in ("head", "embedding", "norm"):
            wanted = expected[name]
            scale = np.abs(wanted).max()
            assert scale > 0
            ours = ranks[0][size][name][: len(wanted)]
            np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_metrics_are_those_of_the_whole_batch(ranks, expected):
    for rank in ranks:
        for result in rank.values():
            metrics = result["metrics"]
            assert metrics["train/value_loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert metrics["train/explained_variance"] == pytest.approx(expected["explained"], rel=1e-5)
            assert 0 < metrics["train/value_clipfrac"] < 1
            assert metrics["train/value_clipfrac"] == pytest.approx(ranks[0][1]["metrics"]["train/value_clipfrac"])
            assert metrics["train/critic_grad_norm"] > 0 and metrics["train/critic_lr"] == 0


def test_explained_variance_rises_from_nothing(model, tmp_path):
    results = run_ranks(critic_cases.learning, 2, tmp_path, model=model)
    explained = results[0]["explained"]
    assert explained[0] == pytest.approx(0.0, abs=1e-9), "the head starts at 0, so that it explains nothing"
    assert explained[-1] > 0.5 and results[1]["explained"] == explained
    assert results[0]["same"]


@pytest.fixture(scope="module")
def with_policy(model, tiny_model_dir, tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """[number of ranks][rank]."""
    inputs = {"model": model, "reference": tiny_model_dir("llama", tied=False, seed=1)}
    return {n: run_ranks(critic_cases.with_policy, n, tmp_path_factory.mktemp("joint"), **inputs) for n in (1, 2)}


def test_the_policy_learns_from_values_alike_on_one_rank_and_on_two(with_policy):
    (one,), two = with_policy[1], with_policy[2]
    for part in ("values", "returns"):
        found = {key: array for rank in two for key, array in rank[part].items()}
        assert found.keys() == one[part].keys()
        for key, array in one[part].items():
            np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-5)
    assert one["metrics"]["train/pg_loss"] != 0
    names = {name for name in one["metrics"] if name.startswith("train/")}
    for rank in two:
        assert {k: rank["metrics"][k] for k in names} == pytest.approx(
            {k: one["metrics"][k] for k in names}, rel=1e-3, abs=1e-5
        )
    for name, array in one["weights"].items():
        np.testing.assert_allclose(two[0]["weights"][name], array, rtol=0, atol=2e-5, err_msg=name)


def test_only_the_critic_learns_at_first(with_policy):
    for rank in [*with_policy[1], *with_policy[2]]:
        assert rank["untouched"] and not [name for name in rank["only critic"] if name.startswith("train/")]
        for key, array in rank["returns"].items():
            assert np.array_equal(rank["early returns"][key], array), "the policy has not moved"
            assert np.isfinite(array).all()
