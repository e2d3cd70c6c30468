"""Critic and policy under every parallel layout: values, loss, gradient, what they hand each other, and weights after a
rollout of two steps are those of one rank; a critic's checkpoint goes on under another layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.critic_layouts import checkpoint, critic_and_policy
from tests.parallel.family_models import VOCAB, make_family
from tests.parallel.layouts import CP, DISTRIBUTED, EP, OVERLAPPED, PP, RECOMPUTED, SP, TP, VPP, run_layouts
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "TP2": ("qwen2", 2, TP),
    "TP2 SP": ("qwen3", 2, TP | SP | DISTRIBUTED),
    "PP2": ("llama", 2, PP),
    "CP2": ("qwen3", 2, CP),
    "EP2": ("qwen3_moe", 2, EP),
    "TP2 SP EP2 ETP1": ("qwen3_moe", 2, TP | SP | EP | {"expert_tensor_parallel_size": 1}),
    "PP2 VPP2 DP2": ("qwen3", 4, PP | VPP | OVERLAPPED),
    "TP2 PP2 SP": ("qwen3", 4, TP | PP | SP | RECOMPUTED),
    "CP2 DP2": ("qwen3", 4, CP | OVERLAPPED),
    "PP2 EP2": ("qwen3_moe", 4, PP | EP | DISTRIBUTED),
}
"""Name -> (model, ranks, options)."""
MODELS = ("qwen3", "llama", "qwen2", "qwen3_moe")
RESHARDED = {"PP2": (2, PP), "one rank": (1, {})}
"""Under what a critic goes on that was saved under TP2 DP2."""


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> list[dict[str, Any]]:
    """[rank][layout]."""
    place = tmp_path_factory.mktemp("critics")

    def made(name: str, seed: int) -> Path:
        if name == "qwen3_moe":
            return make_family(place / f"experts{seed}", name, seed, num_hidden_layers=2)
        return tiny_model_dir(name, hidden=32, layers=4 if name == "qwen3" else 2, seed=seed, tied=name != "llama")

    models = {name: [made(name, seed) for seed in (0, 1)] for name in MODELS}

    def layout(name: str, family: str, size: int, options: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
        model, reference = models[family]
        vocab = VOCAB if family == "qwen3_moe" else 512
        arguments = {"model": model, "reference": reference, "options": options, "vocab": vocab}
        return name, size, arguments | {"case": critic_and_policy}

    def saved(name: str, size: int, options: dict[str, Any], load: Path | None) -> tuple[str, int, dict[str, Any]]:
        arguments = {"model": models["qwen3"][0], "options": options, "saved": place / "saved", "load": load}
        return name, size, arguments | {"case": checkpoint}

    waves = [[layout(f"one rank: {name}", name, 1, {}) for name in MODELS]]
    pairs = [layout(name, *each) for name, each in LAYOUTS.items() if each[1] == 2]
    waves += [pairs[row : row + 2] for row in range(0, len(pairs), 2)]
    waves += [[layout(name, *each)] for name, each in LAYOUTS.items() if each[1] == 4]
    waves.append([saved("saved", 4, TP | SP | DISTRIBUTED, None)])
    resumed = [(f"on {name}", size, options | DISTRIBUTED) for name, (size, options) in RESHARDED.items()]
    waves.append([saved(*each, place / "saved") for each in resumed])
    return run_ranks(run_layouts, 4, tmp_path_factory.mktemp("layouts"), timeout=250, waves=waves)


def of(results: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """By rank of the layout."""
    return [ranks[name] for ranks in results if name in ranks]


def one_rank(results: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return of(results, f"one rank: {LAYOUTS[name][0]}")[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_their_gradient_are_those_of_one_rank(name, results):
    ranks, wanted = of(results, name), one_rank(results, name)
    assert_same_rows(ranks, wanted, "values")
    for rank in ranks:
        assert rank["step"] == pytest.approx(wanted["step"], rel=2e-6, abs=1e-6)
    assert_same_tensors(ranks, wanted["gradients"], "gradients", relative=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_critic_and_policy_learn_from_each_other_as_on_one_rank(name, results):
    ranks, wanted = of(results, name), one_rank(results, name)
    assert_same_rows(ranks, wanted, "returns")
    for part in ("policy", "critic"):
        for rank in ranks:
            assert rank[part] == pytest.approx(wanted[part], rel=1e-5, abs=2e-6), part
        assert_same_tensors(ranks, wanted[f"{part} weights"], f"{part} weights", absolute=2e-5)


def test_critics_explained_variance_is_of_all_tokens_of_a_rollout(results):
    metrics = of(results, "one rank: qwen3")[0]["critic"]
    steps = [metrics[f"train/step_{row}/explained_variance"] for row in range(2)]
    assert metrics["train/explained_variance"] != pytest.approx(sum(steps) / 2, rel=1e-3)
    losses = [metrics[f"train/step_{row}/value_loss"] for row in range(2)]
    assert metrics["train/value_loss"] == pytest.approx(sum(losses) / 2)


@pytest.mark.parametrize("name", RESHARDED)
def test_a_critics_checkpoint_goes_on_under_another_layout(name, results):
    saved, ranks = of(results, "saved"), of(results, f"on {name}")
    values = saved[0]["values"] | saved[2]["values"]  # of both parts of the batch
    for rank in ranks:
        assert rank["first"] == 1
        assert rank["metrics"] == pytest.approx(saved[0]["metrics"], rel=1e-5, abs=1e-6)
        assert rank["values"].keys() == values.keys()
    assert_same_rows(ranks, {"values": values}, "values")
    assert_same_tensors(ranks, together(saved, "weights"), "weights", absolute=1e-5)


def assert_same_rows(ranks: list[dict[str, Any]], wanted: dict[str, Any], part: str) -> None:
    found: dict[int, np.ndarray] = {}
    for rank in ranks:
        for key, row in rank[part].items():
            if not rank["last stage"]:
                assert not row.any(), "nothing is computed there"
                continue
            assert np.abs(found.setdefault(key, row) - row).max() < 1e-6, "ranks of one part of a batch differ"
    assert found.keys() == wanted[part].keys()
    for key, row in wanted[part].items():
        np.testing.assert_allclose(found[key], row, rtol=0, atol=1e-5, err_msg=f"{part} of sample {key}")


def together(ranks: list[dict[str, Any]], part: str) -> dict[str, np.ndarray]:
    return {key: tensor for rank in ranks for key, tensor in rank[part].items()}


def assert_same_tensors(
    ranks: list[dict[str, Any]],
    wanted: dict[str, np.ndarray],
    part: str,
    *,
    absolute: float = 0.0,
    relative: float = 0.0,
) -> None:
    """`relative`: to the length of the tensor, or, where that is next to nothing, of the longest one."""
    found = together(ranks, part)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if relative:
            assert np.linalg.norm(found[key] - tensor) <= relative * np.linalg.norm(tensor), (part, key)
        else:
            np.testing.assert_allclose(found[key], tensor, rtol=0, atol=absolute, err_msg=f"{part} {key}")
