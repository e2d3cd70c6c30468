"""The loss of SFT and a teacher's log-probs, its own or an engine's, in every layout of the ranks: as on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel.layouts import run_layouts
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(180)

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "DP2": {"use_distributed_optimizer": True},
}
SFT = {"loss_type": "sft_loss", "rollout_batch_size": 8, "n_samples_per_prompt": 1}


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> list[dict[str, Any]]:
    """[rank][layout, loss]."""
    model, teacher = (tiny_model_dir("qwen3", hidden=32, layers=2, seed=seed) for seed in (0, 1))
    opd = {"use_opd": True, "opd_teacher_load": teacher}
    losses = {"sft": SFT, "opd": opd | {"opd_type": "megatron"}, "engine": opd | {"opd_type": "sglang"}}

    def layout(name: str, size: int, loss: str) -> tuple[str, int, dict[str, Any]]:
        arguments = {"model": model, "options": LAYOUTS.get(name, {}) | losses[loss], "batches": ["2 samples"]}
        rollout = {"taught": True} if loss == "engine" else {}
        return f"{name}, {loss}", size, arguments | {"rollout": rollout, "policy_losses": ["ppo"]}

    waves = [[layout("one rank", 1, "sft"), layout("one rank", 1, "opd")], [layout("one rank", 1, "engine")]]
    waves += [[layout(name, 2, loss)] for name in LAYOUTS for loss in losses]
    return run_ranks(run_layouts, 2, tmp_path_factory.mktemp("layouts"), timeout=160, waves=waves)


@pytest.mark.parametrize("loss", ["sft", "opd", "engine"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_trains_as_on_one_rank(name, loss, results):
    wanted = results[1 if loss == "opd" else 0][f"one rank, {loss}"]
    found = results[0][f"{name}, {loss}"]
    for part in ("steps", "trainings"):
        for key, one in wanted[part].items():
            for metric in ("train/loss", "train/grad_norm", *(["train/opd_kl"] if loss != "sft" else [])):
                assert found[part][key]["metrics"][metric] == pytest.approx(one["metrics"][metric], rel=1e-4), metric
    gradients = wanted["steps"]["2 samples"]["gradients"]
    scale = max(np.abs(tensor).max() for tensor in gradients.values())
    for key, tensor in gradients.items():
        assert np.abs(found["steps"]["2 samples"]["gradients"][key] - tensor).max() < 1e-5 * scale, key
    assert "train/kl_loss" not in found["trainings"]["ppo"]["metrics"]
