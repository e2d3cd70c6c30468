"""Every model family against transformers' own class: the same logits, gradients and named tensors, in every layout.

Logits differ by at most 1e-5 and gradients by 1e-5 relative to their largest element, in float32; names and weights
are those of the checkpoint, bit by bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import family_cases
from tests.parallel.family_models import EXPERTS, FAMILIES, hf_model, make_family
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-5
DENSE = ["llama3", "qwen2", "qwen3", "glm4"]
SPARSE = ["qwen3_moe", "glm4_moe", "deepseek_v3", "moonlight", "glm4_moe_lite"]
WORLD = {"actor_num_gpus_per_node": 2}
TP2 = WORLD | {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
PP2 = WORLD | {"pipeline_model_parallel_size": 2}
EP2 = WORLD | {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "TP2": (DENSE, TP2),
    "PP2": (DENSE + SPARSE, PP2),
    "EP2": (SPARSE, EP2),
    "TP2 with SP": (SPARSE, TP2 | SP),
    "CP2": (["glm4", "glm4_moe", "deepseek_v3", "moonlight"], WORLD | {"context_parallel_size": 2}),
    "TP2 with SP, EP2 with whole experts": (["deepseek_v3"], TP2 | SP | EP2 | {"expert_tensor_parallel_size": 1}),
}
ON_TWO_RANKS = [(layout, name) for layout, (names, _) in LAYOUTS.items() for name in names]
BF16 = "glm4_moe"


@pytest.fixture(scope="session")
def family_models(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {name: make_family(place / str(row), name) for row, name in enumerate(FAMILIES)}


@pytest.fixture(scope="session")
def wanted(family_models):
    """Name -> (logits, gradients) of transformers."""
    return cache(lambda name: family_cases.hf_outputs(hf_model(family_models[name])))


@pytest.fixture(scope="session")
def checkpoints(family_models):
    """Name -> tensors of the checkpoint, without the copy of a tied head."""
    from safetensors.torch import load_file

    return cache(lambda name: load_file(family_models[name] / "model.safetensors"))


@pytest.fixture(scope="session")
def one_rank_families(family_models, tmp_path_factory) -> list[dict[str, Any]]:
    runs = {name: {"model": path} for name, path in family_models.items()}
    runs["bf16"] = {"model": family_models[BF16], "options": {"bf16": True}}
    return run_ranks(family_cases.outputs, 1, tmp_path_factory.mktemp("one"), timeout=600, runs=runs)


@pytest.fixture(scope="session")
def two_ranks_families(family_models, tmp_path_factory) -> list[dict[str, Any]]:
    runs = {
        f"{layout}: {name}": {"model": family_models[name], "options": LAYOUTS[layout][1]}
        for layout, name in ON_TWO_RANKS
    }
    return run_ranks(family_cases.outputs, 2, tmp_path_factory.mktemp("two"), timeout=600, runs=runs)


def check(ranks: list[dict[str, Any]], logits: torch.Tensor, gradients: Any, tensors: dict[str, torch.Tensor]) -> None:
    """What all ranks returned of a run, against transformers."""
    found = [rank["logits"] for rank in ranks if rank["logits"] is not None]
    assert found
    for ours in found:
        assert ours.shape == logits.shape
        assert (ours - logits).abs().max() < TOLERANCE
    exported = ranks[0]["weights"]
    assert exported.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(exported[name], tensors[name])] == []
    for name, ours in ranks[0]["gradients"].items():
        theirs = family_cases.hf_gradient(gradients, name)
        if theirs is not None:
            assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max(), name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_that_of_transformers(one_rank_families, wanted, checkpoints, name):
    check([rank[name] for rank in one_rank_families], *wanted(name), checkpoints(name))


@pytest.mark.parametrize(("layout", "name"), ON_TWO_RANKS)
def test_a_family_is_the_same_on_two_ranks(two_ranks_families, wanted, checkpoints, layout, name):
    check([rank[f"{layout}: {name}"] for rank in two_ranks_families], *wanted(name), checkpoints(name))


def test_every_family_with_experts_is_divided_in_every_way():
    assert {name.partition(",")[0].partition(" ")[0] for name in EXPERTS} - {"kimi_k2"} == set(SPARSE)


def test_all_parameters_have_a_gradient(one_rank_families):
    """So that the comparison of gradients says something."""
    gradients = one_rank_families[0]["deepseek_v3"]["gradients"]
    bare = [name for name, gradient in gradients.items() if not gradient.any()]
    assert {name.rpartition(".experts.")[0] for name in bare} <= {f"model.layers.{row}.mlp" for row in range(1, 4)}


def test_the_bias_that_chooses_experts_stays_float32_in_bf16(one_rank_families, checkpoints):
    weights = one_rank_families[0]["bf16"]["weights"]
    for name, tensor in checkpoints(BF16).items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(weights[name], tensor if kept else tensor.bfloat16()), name
