"""Every parallel layout trains as one rank does: loss, metrics, gradients, and weights after two Adam steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel.family_models import VOCAB, make_family
from tests.parallel.layouts import BATCHES, CP, DISTRIBUTED, EP, OVERLAPPED, PP, RECOMPUTED, SP, TP, VPP, run_layouts
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(900)


TWO_RANKS: dict[str, dict[str, Any]] = {
    "TP2": TP,
    "TP2 SP": TP | SP,
    "PP2": PP,
    "PP2 VPP2": PP | VPP,
    "DP2": {},
    "DP2 distributed optimizer": DISTRIBUTED,
    "DP2 overlapped": OVERLAPPED,
    "CP2": CP,
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "TP2 PP2 SP": TP | PP | SP | RECOMPUTED,
    "TP2 CP2": TP | CP,
    "CP2 DP2": CP | OVERLAPPED,
}
MORE: dict[str, dict[str, Any]] = {
    "TP2 SP PP2 VPP2": TP | SP | PP | VPP | {"recompute_activations": True},
    "TP2 SP CP2": TP | SP | CP,
    "PP2 CP2": PP | CP,
    "PP2 VPP2 DP2": PP | VPP | OVERLAPPED,
}
"""Also of four ranks; with one way to make micro-batches."""
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "EP2": (2, EP),
    "TP2 EP2 ETP1": (2, TP | SP | EP | {"expert_tensor_parallel_size": 1}),
    "CP2 EP2": (2, CP | EP | DISTRIBUTED),
    "EP2 distributed optimizer": (2, EP | DISTRIBUTED),
    "TP2 EP2": (4, TP | SP | EP),
    "PP2 EP2": (4, PP | EP | OVERLAPPED),
}
"""Of a mixture of experts: the number of ranks, and the options."""
ROUND = [name for name in BATCHES if name != "3 samples"]
LAYOUTS = [*TWO_RANKS, *FOUR_RANKS, *MORE]
HALF = TP | SP | PP | {"bf16": True, "recompute_activations": True}
LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
POLICY_LOSSES = ["ppo", "gspo"]
"""That of a token, and one of a whole sample."""


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> list[dict[str, Any]]:
    """[rank][layout]."""
    model = tiny_model_dir("qwen3", hidden=32, layers=4)
    options = LOSS | {"ref_load": tiny_model_dir("qwen3", hidden=32, layers=4, seed=1)}

    mixture = [make_family(tmp_path_factory.mktemp("experts"), "qwen3_moe", seed) for seed in (0, 1)]

    def experts(name: str, size: int, further: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
        arguments = {
            "model": mixture[0],
            "options": LOSS | {"ref_load": mixture[1]} | further,
            "batches": ["2 samples", "dynamic"],
            "rollout": {"vocab": VOCAB},
            "policy_losses": ["ppo"],
        }
        return name, size, arguments

    def layout(name: str, size: int, further: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
        arguments = {
            "model": model,
            "options": options | further,
            "batches": ["3 samples"] if name in MORE else ROUND if name in FOUR_RANKS else list(BATCHES),
            "rollout": {},
            "policy_losses": POLICY_LOSSES if name in ("CP2", "CP2 DP2") or size == 1 else ["ppo"],
        }
        return name, size, arguments

    pairs = [layout(name, 2, further) for name, further in TWO_RANKS.items()]
    waves = [[layout("one rank", 1, {}), experts("experts on one rank", 1, {})]]
    waves += [pairs[row : row + 2] for row in range(0, len(pairs), 2)]
    waves += [[layout(name, 4, further)] for name, further in (FOUR_RANKS | MORE).items()]
    mixtures = [experts(name, size, further) for name, (size, further) in EXPERTS.items()]
    half = {"model": model, "options": options | HALF, "batches": ["2 samples"], "rollout": {}, "policy_losses": []}
    waves += [[("bfloat16", 4, half)]]
    waves += [mixtures[0:2], mixtures[2:4], mixtures[4:5], mixtures[5:6]]
    return run_ranks(run_layouts, 4, tmp_path_factory.mktemp("layouts"), timeout=600, waves=waves)


@pytest.fixture(scope="module")
def one_rank(results) -> dict[str, Any]:
    return results[0]["one rank"]


def on_first_rank(results: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(ranks[name] for ranks in results if name in ranks)


@pytest.mark.parametrize("name", EXPERTS)
def test_a_mixture_of_experts_trains_as_on_one_rank(name, results):
    check_steps(on_first_rank(results, name), results[1]["experts on one rank"])
    check_trainings(on_first_rank(results, name), results[1]["experts on one rank"])


def test_bfloat16_is_close_to_float32(results, one_rank):
    found, wanted = (layout["steps"]["2 samples"] for layout in (on_first_rank(results, "bfloat16"), one_rank))
    for name in ("train/loss", "train/kl_loss", "train/entropy_loss", "train/grad_norm"):
        assert found["metrics"][name] == pytest.approx(wanted["metrics"][name], rel=0.05), name
    # The gradients that the optimizer takes are float32, and no parameter's is missing or counted twice.
    for key, tensor in wanted["gradients"].items():
        assert found["gradients"][key].dtype == np.float32
        assert np.linalg.norm(found["gradients"][key] - tensor) < 0.2 * np.linalg.norm(tensor), key


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_step_is_that_of_one_rank_whatever_the_micro_batches(name, results, one_rank):
    check_steps(on_first_rank(results, name), one_rank)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_adam_steps_are_those_of_one_rank(name, results, one_rank):
    check_trainings(on_first_rank(results, name), one_rank)


def check_steps(layout: dict[str, Any], one_rank: dict[str, Any]) -> None:
    found, wanted = layout["steps"], one_rank["steps"]["2 samples"]
    assert found
    for batch in found:
        check_metrics(found[batch]["metrics"], wanted["metrics"], batch)
        check_gradients(found[batch]["gradients"], wanted["gradients"], batch)


def check_trainings(layout: dict[str, Any], one_rank: dict[str, Any]) -> None:
    for loss, found in layout["trainings"].items():
        wanted = one_rank["trainings"][loss]
        check_metrics(found["metrics"], wanted["metrics"], loss, 3e-6)
        assert found["weights"].keys() == wanted["weights"].keys()
        for key, tensor in wanted["weights"].items():
            np.testing.assert_allclose(found["weights"][key], tensor, rtol=0, atol=1e-5, err_msg=f"{loss} {key}")
        assert found["copies agree"], loss


def test_training_moves_the_weights_and_depends_on_the_loss(one_rank):
    ppo, gspo = (one_rank["trainings"][name]["weights"] for name in POLICY_LOSSES)
    assert max(np.abs(ppo[key] - gspo[key]).max() for key in ppo) > 1e-4


def test_metrics_are_the_same_on_all_ranks(results):
    for name in [*LAYOUTS, *EXPERTS]:
        ranks = [rank[name] for rank in results if name in rank]
        for kind in ("steps", "trainings"):
            for case, first in ranks[0][kind].items():
                assert all(timeless(rank[kind][case]["metrics"]) == timeless(first["metrics"]) for rank in ranks[1:])


def test_the_driver_knows_which_part_of_the_batch_a_rank_trains(results):
    for name in [*LAYOUTS, *EXPERTS]:
        places = [rank[name]["data-parallel rank"] for rank in results if name in rank]
        assert all(told == actual for told, actual in places), (name, places)
    assert [rank["CP2 DP2"]["data-parallel rank"][0] for rank in results] == [0, 0, 1, 1]


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith("perf/")}


def check_metrics(found: dict[str, float], wanted: dict[str, float], what: str, tolerance: float = 1e-6) -> None:
    assert timeless(found) == pytest.approx(timeless(wanted), rel=tolerance, abs=1e-6), what


def check_gradients(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], what: str) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        error = np.linalg.norm(found[key] - tensor) / np.linalg.norm(tensor)
        assert error < 1e-5, (what, key, error)
