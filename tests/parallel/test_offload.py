"""A trainer whose memory is given back between rollouts is the same one, bit by bit; and it is given back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import offload_cases
from tests.parallel.family_models import make_family
from tests.parallel.layouts import DISTRIBUTED, EP, PP, SP, TP, VPP
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)
BF16 = {"bf16": True}
LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "DP2 distributed bf16": DISTRIBUTED | BF16 | LOSS | {"keep_old_actor": True},
    "TP2": TP | SP | LOSS,
    "PP2 VPP2 bf16": PP | VPP | BF16,
    "DP2 without moments": DISTRIBUTED | BF16 | {"use_stateless_adam": True},
    "EP2": EP | DISTRIBUTED,
    "critic TP2 bf16": TP | BF16,
}
RESUMED = ("DP2 distributed bf16", "EP2", "critic TP2 bf16")
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> list[dict[str, Any]]:
    """[rank][run]."""
    model = tiny_model_dir("qwen3", hidden=32, layers=4)
    other = tiny_model_dir("qwen3", hidden=32, layers=4, seed=1)
    experts = make_family(tmp_path_factory.mktemp("experts"), "qwen3_moe")
    place = tmp_path_factory.mktemp("offload")
    runs = {}
    for row, (name, options) in enumerate(RUNS.items()):
        chosen = options | ({"ref_load": other} if "use_kl_loss" in options else {})
        runs[name] = {"model": experts if name == "EP2" else model, "place": place / str(row), "options": chosen}
        runs[name] |= {"critic": "critic" in name, "resumes": name in RESUMED}
    return run_ranks(offload_cases.several, 2, tmp_path_factory.mktemp("ranks"), runs=runs)


@pytest.mark.parametrize("name", RUNS)
def test_training_is_bit_by_bit_the_same_with_memory_given_back_in_between(name, results):
    for rank in results:
        straight = rank[name]["straight"]
        assert len(straight["state"]) > 10
        assert rank[name]["offloaded"] == straight
        if name not in RESUMED:
            continue
        resumed = rank[name]["resumed"]
        assert resumed["metrics"] == straight["metrics"][1:]
        assert resumed["weights"] == straight["weights"][1:]
        assert resumed["state"] == straight["state"]
        assert resumed["draws"] == straight["draws"]
    assert "critic" in name or len(set(map(str, results[0][name]["straight"]["weights"]))) == 2


def test_all_but_the_libraries_is_given_back_to_the_system(tiny_model_dir, tmp_path):
    model = tiny_model_dir("qwen3", vocab=20000, hidden=512, layers=4, initializer_range=0.02)
    (sizes,) = run_ranks(offload_cases.resident, 1, tmp_path / "ranks", model=model)
    sizes = {name: size / MEBIBYTE for name, size in sizes.items()}
    # 90 MiB of parameters, of gradients, of each moment, and of the reference.
    for again in ("", " again"):
        assert sizes["trained" + again] - sizes["released" + again] > 5 * 83, sizes
        # The libraries' own pages come with the first step.
        assert sizes["released" + again] - sizes["before"] < 110, sizes
        # Tensors are read one by one; the largest has 39 MiB.
        assert sizes["read" + again] - sizes["released" + again] < 85, sizes
