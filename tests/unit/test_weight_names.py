"""The name tables, read in both directions, against transformers' own tensors."""

from __future__ import annotations

import json

import pytest
import torch

from colloid.errors import CheckpointError, ConfigError
from colloid.weights.export import Exporter
from colloid.weights.hf_loader import HFCheckpoint, load_parameters
from colloid.weights.names import FAMILIES, ModelShape, NameMap, Shard
from tests.tiny import make_tiny_model

MODELS = [("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False)]


def shape(tied: bool = True, vocab: int = 512, padded: int = 512) -> ModelShape:
    return ModelShape(2, 4, 2, vocab, padded, tied)


def megatron_tensors(names: NameMap, checkpoint: HFCheckpoint, spelling: int = 0) -> dict[str, torch.Tensor]:
    """All whole Megatron tensors of the checkpoint, by one of their spellings."""
    found = {}
    for entry in FAMILIES["qwen2" if any("bias" in name for name in names.hf_names) else "qwen3"]:
        for layer in range(2):
            name = entry.megatron[min(spelling, len(entry.megatron) - 1)].format(layer=layer)
            try:
                found[name] = names[name].from_hf(checkpoint.tensor)
            except ConfigError:
                assert "_layernorm" in name  # those of Qwen3, in another family
    return found


@pytest.mark.parametrize(("family", "tied"), MODELS)
@pytest.mark.parametrize("spelling", [0, 1])
def test_loading_and_export_are_inverse_and_complete(tiny_model_dir, family, tied, spelling):
    checkpoint = HFCheckpoint(tiny_model_dir(family, tied=tied))
    names = NameMap(family, shape(tied))
    parameters = [(name, torch.nn.Parameter(t)) for name, t in megatron_tensors(names, checkpoint, spelling).items()]
    exported = dict(Exporter(parameters, names, max_bytes=1 << 20)())
    assert exported.keys() == set(names.hf_names) == set(checkpoint.names()) - {"lm_head.weight" if tied else ""}
    for name, tensor in exported.items():
        assert torch.equal(tensor, checkpoint.tensor(name)), name


def test_attention_weights_are_interleaved_by_group(tiny_model_dir):
    checkpoint = HFCheckpoint(tiny_model_dir("qwen2"))
    names = NameMap("qwen2", shape())
    for kind in ("weight", "bias"):
        merged = names[f"decoder.layers.1.self_attention.linear_qkv.{kind}"].from_hf(checkpoint.tensor)
        q, k, v = (checkpoint.tensor(f"model.layers.1.self_attn.{x}_proj.{kind}") for x in "qkv")
        # Head size 16, two query heads and one key and value head a group.
        wanted = [q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]]
        assert torch.equal(merged, torch.cat(wanted))


def test_vocabulary_is_padded_with_zeros_and_cut_again(tiny_model_dir):
    checkpoint = HFCheckpoint(tiny_model_dir("qwen3"))
    parameter = NameMap("qwen3", shape(padded=640))["embedding.word_embeddings.weight"]
    padded = parameter.from_hf(checkpoint.tensor)
    assert padded.shape == (640, 64)
    assert not padded[512:].any()
    ((name, tensor),) = parameter.to_hf(padded)
    assert name == "model.embed_tokens.weight"
    assert torch.equal(tensor, padded[:512])


def test_tied_head_is_loaded_from_the_embedding_and_not_exported():
    head = NameMap("llama", shape(tied=True))["output_layer.weight"]
    assert head.hf_names == ("model.embed_tokens.weight",)
    assert not head.entry.exported
    assert NameMap("llama", shape(tied=False))["output_layer.weight"].hf_names == ("lm_head.weight",)


@pytest.mark.parametrize("shard", list(Shard))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_join_to_the_whole(shard, size):
    full = torch.randn(16, 8)
    parts = [shard.cut(full, rank, size) for rank in range(size)]
    assert torch.equal(shard.join(parts), full)
    assert shard is Shard.REPLICATED or sum(part.numel() for part in parts) == full.numel()


def test_gated_shard_holds_its_part_of_gate_and_up():
    full = torch.arange(8.0)[:, None]
    assert Shard.GATED_ROWS.cut(full, 1, 2).flatten().tolist() == [2, 3, 6, 7]


def test_unknown_family_and_unknown_parameter_are_errors():
    with pytest.raises(ConfigError, match="'gpt2' are not supported yet; supported are deepseek_v3, glm4, .*qwen3_moe"):
        NameMap("gpt2", shape())
    with pytest.raises(ConfigError, match="no Megatron parameter 'decoder.layers.0.self_attention.q_layernorm.weight'"):
        NameMap("llama", shape())["decoder.layers.0.self_attention.q_layernorm.weight"]


def test_weights_of_another_model_are_an_error_that_names_them(tiny_model_dir):
    checkpoint = HFCheckpoint(tiny_model_dir("qwen2"))
    with pytest.raises(ConfigError, match=r"missing model.layers.0.self_attn.q_norm.weight.* unexpected .*bias"):
        load_parameters([], NameMap("qwen3", shape()), checkpoint)
    wider = torch.nn.Parameter(torch.zeros(512, 32))
    with pytest.raises(ConfigError, match=r"embed_tokens.weight is \(512, 64\) where the model has \(512, 32\)"):
        load_parameters([("embedding.word_embeddings.weight", wider)], NameMap("qwen2", shape()), checkpoint)


def test_unreadable_weights_are_an_error_that_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        HFCheckpoint(tmp_path)
    make_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        HFCheckpoint(tmp_path)


def test_sharded_checkpoint_is_read_through_its_index(tiny_model_dir, tmp_path):
    from safetensors.torch import save_file

    whole = HFCheckpoint(tiny_model_dir("llama"))
    files = {}
    for row, name in enumerate(whole.names()):
        files[name] = f"model-{row % 2}.safetensors"
    for file in set(files.values()):
        save_file({name: whole.tensor(name) for name in files if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    sharded = HFCheckpoint(tmp_path)
    assert all(torch.equal(sharded.tensor(name), whole.tensor(name)) for name in whole.names())
