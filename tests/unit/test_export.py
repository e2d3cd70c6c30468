"""The plan by which tensors come together, and the directory that they are written to."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from colloid.errors import CheckpointError, ConfigError
from colloid.weights.export import Exporter, announce, make_plan
from colloid.weights.hf_directory import write_hf_directory
from colloid.weights.hf_loader import HFCheckpoint, load_parameters
from colloid.weights.names import ModelShape, NameMap
from colloid.weights.shards import WHOLE, Coordinates

SHAPE = ModelShape(2, 4, 2, 512, 512, tied=False)


def parameters(names: NameMap, checkpoint: HFCheckpoint) -> list[tuple[str, torch.nn.Parameter]]:
    """The whole model's, in Megatron's first spelling."""
    spellings = [name for name in names._parameters if "layer_norm_" not in name]
    return [(name, torch.nn.Parameter(names[name].from_hf(checkpoint.tensor))) for name in spellings]


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    checkpoint = HFCheckpoint(tiny_model_dir("llama", tied=False))
    names = NameMap("llama", SHAPE)
    return checkpoint, names, parameters(names, checkpoint)


def pieces(model, rank: int, coordinates: Coordinates, keep=lambda name: True) -> list:
    """What a rank announces that holds shards of the parameters with `keep`."""
    _, names, whole = model
    held = []
    for name, parameter in whole:
        if keep(name):
            cut = names[name].entry.shard.cut(parameter.data, *coordinates.shard(name))
            held.append((name, torch.nn.Parameter(cut)))
    return announce(rank, held, names, coordinates)


def test_rounds_are_bounded_hold_everything_once_and_keep_the_tables_order(model):
    _, names, whole = model
    limit = 100_000
    rounds = make_plan(pieces(model, 0, WHOLE), names, WHOLE, limit)
    items = [item for items in rounds for item in items]
    assert [name for item in items for name in names[item.name].hf_names] == names.hf_names
    assert len(rounds) > 3
    for items in rounds:
        assert len(items) == 1 or sum(item.nbytes for item in items) <= limit
    # None could have taken the next one's first parameter as well.
    for items, following in zip(rounds, rounds[1:], strict=False):
        assert sum(item.nbytes for item in items) + following[0].nbytes > limit


def test_copies_send_nothing_and_the_first_of_several_ranks_sends(model):
    _, names, _ = model
    first, second = (Coordinates(tp_rank=rank, tp_size=2) for rank in range(2))
    replicas = [replace(first, is_replica=True), replace(second, is_replica=True)]
    announced = [piece for rank, place in enumerate([first, second, *replicas]) for piece in pieces(model, rank, place)]
    items = [item for items in make_plan(announced, names, first, 1 << 20) for item in items]
    for item in items:
        senders = [piece.rank for piece in item.pieces]
        assert senders == ([0] if "norm" in item.name else [0, 1]), item.name


def test_plan_does_not_depend_on_the_order_of_announcements(model):
    _, names, _ = model
    places = [Coordinates(tp_rank=rank, tp_size=2) for rank in range(2)]
    announced = [piece for rank, place in enumerate(places) for piece in pieces(model, rank, place)]
    assert make_plan(announced, names, places[0], 99) == make_plan(announced[::-1], names, places[1], 99)


def test_tensors_that_no_rank_holds_are_an_error_that_names_them(model):
    _, names, _ = model
    place = Coordinates(tp_rank=0, tp_size=2)
    with pytest.raises(ConfigError, match=r"no rank has .*mlp.linear_fc2.weight \(shards \[0\] of 2\)"):
        make_plan(pieces(model, 0, place, lambda name: "layers.1.mlp.linear_fc2" in name), names, place, 99)
    with pytest.raises(ConfigError, match="no rank has model.embed_tokens.weight$"):
        make_plan(pieces(model, 0, WHOLE, lambda name: "embedding" not in name), names, WHOLE, 99)


def test_directory_is_sharded_bounded_and_equal_to_what_was_loaded(model, tmp_path):
    checkpoint, names, whole = model
    export = Exporter(whole, names, max_bytes=50_000)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "left").write_text("of an earlier one")
    write_hf_directory(tmp_path / "out", export(), checkpoint.directory, shard_bytes=200_000)
    written = HFCheckpoint(tmp_path / "out")
    assert all(written.tensor(name).equal(checkpoint.tensor(name)) for name in checkpoint.names())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 210_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for _, parameter in whole)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert (tmp_path / "out" / "tokenizer.json").exists() and not (tmp_path / "out" / "left").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_every_tensor_is_taken_also_where_writing_fails(model, tmp_path):
    checkpoint, names, whole = model
    taken = []
    tensors = ((name, taken.append(name) or tensor) for name, tensor in Exporter(whole, names, max_bytes=1 << 20)())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written to .*file"):
        write_hf_directory(tmp_path / "file" / "out", tensors, checkpoint.directory)
    assert taken == names.hf_names


def test_a_file_that_the_library_cannot_write_is_an_error_that_names_the_directory(model, tmp_path):
    checkpoint, names, whole = model

    def tensors():
        for name, tensor in Exporter(whole, names, max_bytes=1 << 20)():
            shutil.rmtree(tmp_path / ".writing_out", ignore_errors=True)
            yield name, tensor

    with pytest.raises(CheckpointError, match="could not be written to .*out: .*No such file"):
        write_hf_directory(tmp_path / "out", tensors(), checkpoint.directory)


def test_layers_of_multi_token_prediction_are_not_part_of_the_model(model, tmp_path):
    from safetensors.torch import save_file

    checkpoint, names, whole = model
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    load_parameters(whole, names, HFCheckpoint(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="unexpected model.layers.2.eh_proj.weight"):
        load_parameters(whole, names, HFCheckpoint(tmp_path))
