"""From any layout come the tensors that were loaded, bit by bit, a bounded part of the model at a time."""

from __future__ import annotations

import json

import pytest
import torch

from colloid.engines.checksums import tensor_checksum as checksum
from colloid.weights.hf_loader import HFCheckpoint
from tests.parallel.reshard_cases import BUFFER

pytestmark = pytest.mark.timeout(900)  # The first test waits for all ranks.

EXPORTS = ("tensor 2, pipeline 2, tied", "expert 2", "tensor 2, pipeline 2, expert 2", "pipeline 2, interleaved")


@pytest.mark.parametrize("name", EXPORTS)
def test_named_tensors_are_those_of_the_checkpoint_that_was_loaded(four_ranks, exports, name):
    checkpoint = HFCheckpoint(exports[name]["model"])
    wanted = {key: checksum(checkpoint.tensor(key)) for key in checkpoint.names() if key != "lm_head.weight"}
    if "lm_head.weight" in checkpoint.names():
        wanted["lm_head.weight"] = checksum(checkpoint.tensor("lm_head.weight"))
    assert four_ranks[0][name]["checksums"] == wanted
    assert all(four_ranks[rank][name]["checksums"] == {} for rank in (1, 2, 3))


@pytest.mark.parametrize("name", EXPORTS)
def test_no_rank_gathers_more_than_a_round(four_ranks, name):
    received, whole = (four_ranks[0][name][key] for key in ("received", "whole"))
    assert len(received) > 5
    assert 0 < max(received) <= BUFFER < whole / 4
    assert all(four_ranks[rank][name]["received"] == [] for rank in (1, 2, 3))
    assert four_ranks[0][name]["held"] < whole, "the layout does not divide the model"


def test_engines_get_the_whole_model_from_every_layout(four_ranks, exports, recording_engine):
    assert recording_engine.problems == []
    urls = [name for name in EXPORTS if exports[name]["url"]]
    assert len(recording_engine.updates) == len(urls)
    for name, tensors in zip(urls, recording_engine.updates, strict=True):
        assert {key: checksum(tensor) for key, tensor in tensors.items()} == four_ranks[0][name]["checksums"]


@pytest.mark.parametrize("name", ["tensor 2, pipeline 2, tied", "expert 2"])
def test_exported_directory_loads_in_transformers(four_ranks, exports, four_ranks_directory, name):
    import transformers

    directory = four_ranks_directory / name
    ids = torch.arange(3, 23)[None]
    logits = []
    for path in (exports[name]["model"], directory):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        logits.append(model(ids).logits)
    assert torch.equal(*logits)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(four_ranks[0][name]["checksums"])
    assert not list(directory.parent.glob(".writing_*"))
