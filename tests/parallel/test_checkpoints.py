"""A resumed trainer is the same trainer, bit by bit; a damaged checkpoint is named."""

from __future__ import annotations


def test_resumed_run_is_the_same_run_bit_by_bit(one_rank, two_ranks):
    for result in [rank[name] for rank in (one_rank, *two_ranks) for name in rank if name.startswith("resume")]:
        straight, resumed = result["straight"], result["resumed"]
        assert straight[1] == resumed[1]
        assert straight[2] == resumed[2]
        assert timeless(straight[0]) == timeless(resumed[0])
        assert result["state"] == (2, 5)


def test_damaged_checkpoint_is_an_error_that_names_the_file(one_rank):
    damaged = one_rank["damaged"]
    for kind, words in (("cut off", "it is cut off"), ("altered", "its checksum differs"), ("missing", "is missing")):
        assert damaged[kind].startswith("CheckpointError"), damaged[kind]
        assert damaged["file"] in damaged[kind] and words in damaged[kind]
    assert damaged["whole"] == "loaded"


def test_checkpoint_that_cannot_be_written_is_an_error_that_names_it(one_rank):
    message = one_rank["damaged"]["blocked"]
    assert message.startswith("CheckpointError: the trainer's state could not be written to")
    assert "blocked" in message and "Is a directory" in message and len(message) < 1000


def test_checkpoint_without_optimizer_restores_the_weights(one_rank):
    next_rollout, checksums = one_rank["damaged"]["without optimizer"]
    assert next_rollout == 1
    assert checksums == one_rank["damaged"]["saved"]


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "perf/" not in name}
