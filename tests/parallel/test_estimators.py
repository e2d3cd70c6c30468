"""Estimators, losses and corrections are the same on one rank and on two, and in any micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel.layouts import run_layouts
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(280)

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "CP2": {"context_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
KL_REWARD = {"kl_coef": 0.05}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo, whitened": ("ppo", {"normalize_advantages": True}),
    "grpo, each token the same": ("ppo", {"calculate_per_token_loss": True}),
    "gspo": ("gspo", {"advantage_estimator": "gspo"}),
    "cispo": ("cispo", {"advantage_estimator": "cispo", "normalize_advantages": True, "eps_clip": 1e-4}),
    "reinforce++": ("ppo", {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9} | KL_REWARD),
    "reinforce++ baseline": ("ppo", {"advantage_estimator": "reinforce_plus_plus_baseline"} | KL_REWARD),
    "rloo, gmpo": ("gmpo", {"advantage_estimator": "rloo", "policy_loss": "gmpo", "eps_clip": 1e-3}),
    "rloo, sapo": ("sapo", {"advantage_estimator": "rloo", "policy_loss": "sapo", "sapo_tau_neg": 1.5}),
    "grpo, corrected": (
        "ppo",
        {
            "use_tis": True,
            "tis_level": "geometric",
            "rs_upper_bound": 3.0,
            "use_opsm": True,
            "get_mismatch_metrics": True,
        },
    ),
}
"""Name -> (policy loss, options)."""


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> list[dict[str, Any]]:
    """[rank]["algorithm / layout"]."""
    model, other = (tiny_model_dir("qwen3", hidden=32, seed=seed) for seed in (0, 1))
    waves = []
    for name, (loss, options) in ALGORITHMS.items():
        for layout, sizes in {"one": {}, **LAYOUTS}.items():
            given = options | sizes | ({"ref_load": other} if "kl_coef" in options else {})
            rollout = {"per_token": True} if "calculate_per_token_loss" in options else {}
            arguments = {"model": model, "options": given, "rollout": rollout, "policy_losses": [loss]}
            size, batches = (1, ["2 samples", "dynamic"]) if layout == "one" else (2, ["2 samples", "shuffled"])
            waves.append([(f"{name} / {layout}", size, arguments | {"batches": batches})])
    return run_ranks(run_layouts, 2, tmp_path_factory.mktemp("ranks"), timeout=240.0, waves=waves)


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any], part: str) -> None:
    scale = max(np.abs(values).max() for values in theirs[part].values())
    assert scale > 0 and ours[part].keys() == theirs[part].keys()
    for name, values in theirs[part].items():
        np.testing.assert_allclose(ours[part][name], values, rtol=0, atol=2e-5 * scale, err_msg=name)
    mine, reference = ({k: v for k, v in result["metrics"].items() if "perf/" not in k} for result in (ours, theirs))
    assert mine == pytest.approx(reference, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("layout", [*LAYOUTS, "one"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_step_is_the_same_under_every_layout_and_split(results, algorithm, layout):
    expected = results[0][f"{algorithm} / one"]["steps"]["2 samples"]
    for steps in results[0][f"{algorithm} / {layout}"]["steps"].values():
        assert_equal(steps, expected, "gradients")


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_two_steps_of_a_rollout_end_in_the_same_weights_under_every_layout(results, algorithm, layout):
    loss = ALGORITHMS[algorithm][0]
    expected = results[0][f"{algorithm} / one"]["trainings"][loss]
    ours = results[0][f"{algorithm} / {layout}"]["trainings"][loss]
    assert_equal(ours, expected, "weights")
    assert ours["copies agree"]


def test_every_algorithm_trains_other_weights(results):
    flat = {}
    for name, (loss, _) in ALGORITHMS.items():
        weights = results[0][f"{name} / one"]["trainings"][loss]["weights"]
        flat[name] = np.concatenate([tensor.ravel() for tensor in weights.values()])
    names = list(flat)
    for row, name in enumerate(names):
        for other in names[row + 1 :]:
            assert np.abs(flat[name] - flat[other]).max() > 1e-5, (name, other)
