"""A resumed trainer is the same trainer, bit by bit; a damaged checkpoint is named."""

from __future__ import annotations

import pytest

from tests.parallel import cases
from tests.parallel.ranks import run_ranks

DISTRIBUTED = {"use_distributed_optimizer": True}


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return tiny_model_dir("qwen3")


def place(directory, name):
    made = directory / name / "trainer"
    made.mkdir(parents=True)
    return made


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    for name in ("whole", "without_optimizer"):
        place(directory, name)
    resume = {"model": model, "directory": place(directory, "resume"), "options": {}}
    bf16 = {"model": model, "directory": place(directory, "bf16"), "options": {"bf16": True}}
    calls = {
        "float32": ("resume", resume),
        "bf16": ("resume", bf16),
        "damaged": ("damaged_checkpoints", {"model": model, "directory": directory}),
    }
    return run_ranks(cases.several, 1, tmp_path_factory.mktemp("one"), calls=calls)[0]


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    calls = {
        name: ("resume", {"model": model, "directory": place(directory, name), "options": options})
        for name, options in (
            ("whole", {}),
            ("distributed", DISTRIBUTED),
            ("distributed bf16", DISTRIBUTED | {"bf16": True}),
        )
    }
    return run_ranks(cases.several, 2, tmp_path_factory.mktemp("two"), calls=calls)


def test_resumed_run_is_the_same_run_bit_by_bit(one_rank, two_ranks):
    results = [one_rank["float32"], one_rank["bf16"], *(result for rank in two_ranks for result in rank.values())]
    for result in results:
        straight, resumed = result["straight"], result["resumed"]
        assert straight[1] == resumed[1]
        assert straight[2] == resumed[2]
        assert timeless(straight[0]) == timeless(resumed[0])
        assert (result["state"].start_rollout_id, result["state"].weight_version) == (2, 5)


def test_damaged_checkpoint_is_an_error_that_names_the_file(one_rank):
    damaged = one_rank["damaged"]
    for kind, words in (("cut off", "it is cut off"), ("altered", "its checksum differs"), ("missing", "is missing")):
        assert damaged[kind].startswith("CheckpointError"), damaged[kind]
        assert damaged["file"] in damaged[kind] and words in damaged[kind]
    assert damaged["whole"] == "loaded"


def test_checkpoint_without_optimizer_restores_the_weights(one_rank):
    state, checksums = one_rank["damaged"]["without optimizer"]
    assert state.start_rollout_id == 1
    assert checksums == one_rank["damaged"]["saved"]


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "perf/" not in name}
