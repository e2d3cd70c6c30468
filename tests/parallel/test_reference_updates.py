"""A reference that was updated is part of the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import cases
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

OPTIONS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
"""Updated after the second rollout, before the checkpoint, which is resumed with the third."""


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory) -> dict[str, Any]:
    model, other = (tiny_model_dir("qwen3", hidden=32, layers=1, seed=seed) for seed in (0, 1))
    place = tmp_path_factory.mktemp("checkpoints")
    runs = {
        "float32": OPTIONS,
        "bf16, in the background": OPTIONS | {"bf16": True, "async_save": True},
        "moments reset": OPTIONS | {"reset_optimizer_states": True},
        "part of it frozen": OPTIONS | {"freeze_params_name_list": "embed", "use_distributed_optimizer": True},
    }
    calls = {}
    for name, options in runs.items():
        arguments = {"model": model, "directory": place / name, "options": options | {"ref_load": other}}
        calls[name] = ("resume", arguments)
    return run_ranks(cases.several, 1, tmp_path_factory.mktemp("rank"), calls=calls)[0]


@pytest.mark.parametrize("name", ["float32", "bf16, in the background", "moments reset", "part of it frozen"])
def test_a_resumed_run_goes_on_with_the_updated_reference(results, name):
    straight, resumed = (
        ({key: value for key, value in metrics.items() if "perf/" not in key}, *rest)
        for metrics, *rest in (results[name]["straight"], results[name]["resumed"])
    )
    assert straight == resumed
    assert straight[0]["train/step_0/kl_loss"] == 0.0 < straight[0]["train/step_1/kl_loss"]
