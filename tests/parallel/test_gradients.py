"""One loss convention: the gradient is that of a plain Hugging Face model, however the batch is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parallel import cases
from tests.parallel.ranks import run_ranks
from tests.parallel.rollouts import hf_loss, hf_model, make_rollout

FAMILIES = {"qwen3": {}, "qwen2": {}, "llama": {"tied": False}}
LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}


@pytest.fixture(scope="module")
def models(tiny_model_dir) -> dict[str, Path]:
    made = {family: tiny_model_dir(family, **options) for family, options in FAMILIES.items()}
    made["other"] = tiny_model_dir("qwen3", seed=1)
    return made


@pytest.fixture(scope="module")
def runs(models) -> dict[str, dict]:
    full = {"options": LOSS | {"ref_load": models["other"]}, "model": models["qwen3"]}
    return {
        "micro-batches of 1": full | {"micro_batch_size": 1},
        "micro-batches of 3": full | {"micro_batch_size": 3},
        "one micro-batch": full | {"micro_batch_size": 8},
        "only samples with a gradient": {"model": models["qwen3"], "micro_batch_size": 2, "only_gradient": True},
        "all samples": {"model": models["qwen3"], "micro_batch_size": 2},
        "untouched reference": {"model": models["qwen3"], "micro_batch_size": 3, "options": LOSS},
    } | {family: {"model": models[family], "micro_batch_size": 4} for family in ("qwen2", "llama")}


@pytest.fixture(scope="module")
def one_rank(runs, tmp_path_factory) -> dict:
    return run_ranks(cases.one_step, 1, tmp_path_factory.mktemp("one"), runs=runs)[0]


@pytest.fixture(scope="module")
def two_ranks(runs, tmp_path_factory) -> dict:
    first, second = run_ranks(cases.one_step, 2, tmp_path_factory.mktemp("two"), runs=runs)
    for name in runs:
        timeless = [{k: v for k, v in r[name]["metrics"].items() if "perf/" not in k} for r in (first, second)]
        assert timeless[0] == timeless[1], name
    return first


def expected(model: Path, reference: Path, **coefficients: float) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient of transformers' own model in float64."""
    policy = hf_model(model)
    loss = hf_loss(policy, make_rollout(), reference=hf_model(reference), **coefficients)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in policy.named_parameters()}


def relative_error(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Largest, over the tensors, of the norm of the difference by the norm."""
    assert found.keys() == wanted.keys()
    return max(np.linalg.norm(found[name] - wanted[name]) / np.linalg.norm(wanted[name]) for name in wanted)


def test_gradient_is_that_of_the_formulas_on_a_plain_model(models, one_rank):
    for name, reference, coefficients in (
        ("one micro-batch", "other", {"kl_coef": 0.1, "entropy_coef": 0.01}),
        ("all samples", "qwen3", {}),
        ("qwen2", "qwen2", {}),
        ("llama", "llama", {}),
    ):
        model = models[name if name in models else "qwen3"]
        loss, gradients = expected(model, models[reference], **coefficients)
        found = one_rank[name]
        assert found["metrics"]["train/loss"] == pytest.approx(loss, abs=1e-6), name
        assert relative_error(found["gradients"], gradients) < 5e-6, name
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        assert found["metrics"]["train/grad_norm"] == pytest.approx(norm, rel=1e-5), name


def test_gradient_and_metrics_do_not_depend_on_the_split(one_rank, two_ranks):
    wanted = one_rank["one micro-batch"]
    for where in (one_rank, two_ranks):
        for name in ("micro-batches of 1", "micro-batches of 3", "one micro-batch"):
            check_same(where[name], wanted, name)
    for family in ("qwen2", "llama"):
        check_same(two_ranks[family], one_rank[family], family)


def test_samples_without_a_gradient_can_be_left_out(one_rank, two_ranks):
    wanted = one_rank["all samples"]
    for where in (one_rank, two_ranks):
        found = where["only samples with a gradient"]
        assert relative_error(found["gradients"], wanted["gradients"]) < 1e-6
        assert found["metrics"]["train/loss"] == pytest.approx(wanted["metrics"]["train/loss"], abs=1e-7)


def test_kl_to_the_untouched_reference_is_exactly_zero(one_rank, two_ranks):
    for where in (one_rank, two_ranks):
        assert where["untouched reference"]["metrics"]["train/kl_loss"] == 0.0
        assert where["one micro-batch"]["metrics"]["train/kl_loss"] > 1e-3


def check_same(found: dict, wanted: dict, name: str) -> None:
    assert relative_error(found["gradients"], wanted["gradients"]) < 1e-6, name
    for key, value in wanted["metrics"].items():
        if "perf/" not in key:
            assert found["metrics"][key] == pytest.approx(value, rel=2e-6, abs=1e-7), (name, key)
