"""One loss convention: the gradient is that of a plain Hugging Face model, however the batch is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parallel.rollouts import hf_loss, hf_model, make_rollout


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
        found = one_rank["one_step"][name]
        assert found["metrics"]["train/loss"] == pytest.approx(loss, abs=1e-6), name
        assert relative_error(found["gradients"], gradients) < 5e-6, name
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        assert found["metrics"]["train/grad_norm"] == pytest.approx(norm, rel=1e-5), name


def test_gradient_and_metrics_do_not_depend_on_the_split(one_rank, two_ranks):
    wanted = one_rank["one_step"]["one micro-batch"]
    for where in steps(one_rank, two_ranks):
        for name in ("micro-batches of 1", "micro-batches of 3", "one micro-batch"):
            check_same(where[name], wanted, name)
    for family in ("qwen2", "llama"):
        check_same(two_ranks[0]["one_step"][family], one_rank["one_step"][family], family)


def test_samples_without_a_gradient_can_be_left_out(one_rank, two_ranks):
    wanted = one_rank["one_step"]["all samples"]
    for where in steps(one_rank, two_ranks):
        found = where["only samples with a gradient"]
        assert relative_error(found["gradients"], wanted["gradients"]) < 1e-6
        assert found["metrics"]["train/loss"] == pytest.approx(wanted["metrics"]["train/loss"], abs=1e-7)


def test_padding_of_the_vocabulary_and_recomputation_change_nothing(one_rank):
    wanted = one_rank["one_step"]["all samples"]
    for name in ("padded vocabulary", "all recomputed", "attention recomputed"):
        check_same(one_rank["one_step"][name], wanted, name)


def test_kl_to_the_untouched_reference_is_exactly_zero(one_rank, two_ranks):
    for where in steps(one_rank, two_ranks):
        assert where["untouched reference"]["metrics"]["train/kl_loss"] == 0.0
        assert where["one micro-batch"]["metrics"]["train/kl_loss"] > 1e-3


def test_metrics_are_the_same_on_all_ranks(two_ranks):
    first, second = (rank["one_step"] for rank in two_ranks)
    for name in first:
        timeless = [{k: v for k, v in r[name]["metrics"].items() if "perf/" not in k} for r in (first, second)]
        assert timeless[0] == timeless[1], name


def steps(one_rank: dict, two_ranks: list[dict]) -> list[dict]:
    return [one_rank["one_step"], two_ranks[0]["one_step"]]


def check_same(found: dict, wanted: dict, name: str) -> None:
    assert relative_error(found["gradients"], wanted["gradients"]) < 1e-6, name
    for key, value in wanted["metrics"].items():
        if "perf/" not in key:
            assert found["metrics"][key] == pytest.approx(value, rel=2e-6, abs=1e-7), (name, key)
