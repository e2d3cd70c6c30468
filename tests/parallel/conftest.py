"""Few spawns for many tests: importing Megatron takes longer than all cases together.

`one_rank[case]` is what `cases.CASE` returned; `two_ranks[rank][case]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel import cases, reshard_cases
from tests.parallel.engine import RecordingEngine, embedded_engines
from tests.parallel.family_models import make_family
from tests.parallel.ranks import run_ranks

LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
BF16 = {"bf16": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="session")
def models(tiny_model_dir) -> dict[str, Path]:
    """`other` is a reference that is not the start."""
    made = {"qwen3": {}, "qwen2": {}, "llama": {"tied": False}}
    return {name: tiny_model_dir(name, **options) for name, options in made.items()} | {
        "other": tiny_model_dir("qwen3", seed=1)
    }


@pytest.fixture(scope="session")
def engines():
    """Two that work, and one that fails."""
    engines = [RecordingEngine(), RecordingEngine(), RecordingEngine(fail_at="/update_weights_from_tensor")]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def embedded_engine(models, tmp_path_factory):
    """The address of a real engine, with the weights of the tiny Qwen3."""
    with embedded_engines({"qwen3": models["qwen3"]}, tmp_path_factory.mktemp("engine")) as urls:
        yield urls["qwen3"]


@pytest.fixture(scope="session")
def one_rank(models, embedded_engine, tmp_path_factory) -> dict[str, Any]:
    model = models["qwen3"]
    directory = tmp_path_factory.mktemp("checkpoints")
    calls = {
        "one_step": ("one_step", {"runs": one_step_runs(models)}),
        "training": (
            "training",
            {
                "runs": {
                    "micro 1": run(model, 1),
                    "micro 4": run(model, 4),
                    "bf16": run(model, 4, **BF16),
                    "no decay": run(model, 4, weight_decay=0.0),
                }
            },
        ),
        "empty_step": ("empty_step", {"model": model}),
        "uneven": ("uneven_metrics", {"model": model}),
        "non_finite": ("non_finite", {"model": model}),
        "process": ("process_without_cuda", {}),
        "sync": ("sync_with_engine", {"model": model, "url": embedded_engine}),
        "damaged": ("damaged_checkpoints", {"model": model, "directory": directory}),
        "resume": ("resume", {"model": model, "directory": directory / "float32", "options": LOSS}),
        "resume bf16": ("resume", {"model": model, "directory": directory / "bf16", "options": BF16}),
    }
    return run_ranks(cases.several, 1, tmp_path_factory.mktemp("one"), calls=calls)[0]


@pytest.fixture(scope="session")
def two_ranks(models, engines, tmp_path_factory) -> list[dict[str, Any]]:
    model = models["qwen3"]
    directory = tmp_path_factory.mktemp("checkpoints")
    urls = [engine.url for engine in engines]
    runs = {"whole": {}, "distributed": DISTRIBUTED, "overlapped": OVERLAPPED, "bf16": DISTRIBUTED | BF16}
    calls = {
        "one_step": ("one_step", {"runs": one_step_runs(models)}),
        "training": ("training", {"runs": {name: run(model, 2, **options) for name, options in runs.items()}}),
        "empty_step": ("empty_step", {"model": model}),
        "uneven": ("uneven_metrics", {"model": model}),
        "non_finite": ("non_finite", {"model": model}),
        "update": ("update", {"model": model, "urls": urls[:2], "broken": urls[2]}),
    }
    for name, options in (("whole", {}), ("distributed", DISTRIBUTED), ("distributed bf16", DISTRIBUTED | BF16)):
        arguments = {"model": model, "directory": directory / name, "options": options}
        calls[f"resume {name}"] = ("resume", arguments)
    return run_ranks(cases.several, 2, tmp_path_factory.mktemp("two"), calls=calls)


def run(model: Path, micro_batch_size: int, *, only_gradient: bool = False, **options: Any) -> dict[str, Any]:
    """Of `cases.one_step` and `cases.training`."""
    given = {"model": model, "micro_batch_size": micro_batch_size, "options": options}
    return given | ({"only_gradient": True} if only_gradient else {})


def one_step_runs(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    model, full = models["qwen3"], LOSS | {"ref_load": models["other"]}
    return {
        "micro-batches of 1": run(model, 1, **full),
        "micro-batches of 3": run(model, 3, **full),
        "one micro-batch": run(model, 8, **full),
        "only samples with a gradient": run(model, 2, only_gradient=True),
        "all samples": run(model, 2),
        "padded vocabulary": run(model, 2, make_vocab_size_divisible_by=384),
        "all recomputed": run(
            model, 2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ),
        "attention recomputed": run(model, 2, recompute_activations=True),
        "untouched reference": run(model, 3, **LOSS),
        "qwen2": run(models["qwen2"], 4),
        "llama": run(models["llama"], 4),
    }


TENSOR, PIPELINE, EXPERT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
QUARTERS = {TENSOR: 2, PIPELINE: 2, "actor_num_gpus_per_node": 4}
STEP = {"num_steps_per_rollout": 1, "lr_decay_style": "cosine"} | LOSS


@pytest.fixture(scope="session")
def parts(tmp_path_factory) -> dict[str, Path]:
    """Models that are held in parts."""
    place = tmp_path_factory.mktemp("models")
    return {name: make_family(place / name, name) for name in ("qwen2", "qwen3", "qwen3_moe")}


@pytest.fixture(scope="session")
def recording_engine():
    engine = RecordingEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def exports(parts, recording_engine) -> dict[str, dict[str, Any]]:
    """Of `reshard_cases.export`."""
    url = recording_engine.url
    moe, four = parts["qwen3_moe"], {"actor_num_gpus_per_node": 4}
    interleaved = {PIPELINE: 2, "num_layers_per_virtual_pipeline_stage": 1}
    return {
        "tensor 2, pipeline 2, tied": {"model": parts["qwen2"], "options": QUARTERS, "url": url},
        "expert 2": {"model": moe, "options": four | {EXPERT: 2}, "url": None},
        "tensor 2, pipeline 2, expert 2": {
            "model": moe,
            "options": QUARTERS | {EXPERT: 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
            "url": url,
        },
        "pipeline 2, interleaved": {"model": parts["qwen3"], "options": four | interleaved, "url": None},
    }


@pytest.fixture(scope="session")
def four_ranks_directory(tmp_path_factory) -> Path:
    """Where they write, under the names of what they do."""
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="session")
def four_ranks(parts, exports, four_ranks_directory, tmp_path_factory) -> list[dict[str, Any]]:
    """Of `reshard_cases.four_ranks`."""
    quarters = STEP | QUARTERS
    experts = STEP | {PIPELINE: 2, EXPERT: 2, "actor_num_gpus_per_node": 4}
    saves = {
        "plain": {"model": parts["qwen2"], "options": quarters},
        "distributed": {"model": parts["qwen2"], "options": quarters | DISTRIBUTED | {"async_save": True}},
        "experts": {"model": parts["qwen3_moe"], "options": experts},
    }
    given = {"exports": exports, "saves": saves, "place": four_ranks_directory}
    return run_ranks(reshard_cases.four_ranks, 4, tmp_path_factory.mktemp("ranks"), timeout=600.0, **given)


@pytest.fixture(scope="session")
def two_ranks_resumed(four_ranks, parts, four_ranks_directory, tmp_path_factory) -> list[dict[str, Any]]:
    """Of `reshard_cases.resume`."""
    runs = {}
    for name, options in (("plain", {}), ("distributed", DISTRIBUTED)):
        resumed = {"resume_from": str(four_ranks_directory / name), "actor_num_gpus_per_node": 2}
        runs[name] = {"model": parts["qwen2"], "options": STEP | options | resumed}
    return run_ranks(reshard_cases.resume, 2, tmp_path_factory.mktemp("ranks"), runs=runs)


@pytest.fixture(scope="session")
def one_rank_resumed(four_ranks, parts, four_ranks_directory, tmp_path_factory) -> list[dict[str, Any]]:
    """Of `reshard_cases.resume`."""
    model, wider = parts["qwen2"], tmp_path_factory.mktemp("wider")
    make_family(wider, "qwen2", intermediate_size=128)
    places = {name: str(four_ranks_directory / name) for name in ("plain", "distributed", "experts")}
    plain = STEP | {"resume_from": places["plain"]}
    weights = four_ranks_directory / "plain" / "trainer"
    runs = {
        "plain": {"model": model, "options": plain},
        "distributed": {"model": model, "options": STEP | DISTRIBUTED | {"resume_from": places["distributed"]}},
        "experts": {"model": parts["qwen3_moe"], "options": STEP | {"resume_from": places["experts"]}},
        "without optimizer": {"model": model, "options": plain | {"no_load_optim": True}},
        "another optimizer": {"model": model, "options": plain | DISTRIBUTED},
        "another model": {"model": wider, "options": plain},
        "started from it": {"model": model, "options": STEP, "weights": weights},
        "as reference": {"model": model, "options": STEP, "weights": weights, "reference": weights},
    }
    return run_ranks(reshard_cases.resume, 1, tmp_path_factory.mktemp("ranks"), runs=runs)
