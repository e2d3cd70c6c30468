"""The name tables, read in both directions, against transformers' own tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn import Parameter

from colloid.errors import CheckpointError, ConfigError
from colloid.models.derive import model_arguments
from colloid.weights.export import Exporter
from colloid.weights.hf_loader import HFCheckpoint, load_parameters
from colloid.weights.names import FAMILIES, ModelShape, NameMap, Shard, with_global_expert
from tests.parallel.family_models import FAMILIES as MODELS_OF_FAMILIES
from tests.parallel.family_models import make_family
from tests.tiny import make_tiny_model

MODELS = [("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False)]
SPELLINGS = {"local": 0, "Transformer Engine": 1}


def shape(tied: bool = True, vocab: int = 512, padded: int = 512) -> ModelShape:
    return ModelShape(2, 4, 2, vocab, padded, tied)


def shape_of(directory: Path) -> ModelShape:
    """The numbers of a model, from its config."""
    config = json.loads((directory / "config.json").read_text())
    arguments = model_arguments(config)
    return ModelShape(
        num_layers=arguments["num_layers"],
        num_attention_heads=arguments["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        vocab_size=arguments["vocab_size"],
        padded_vocab_size=128,
        tied=not arguments["untie_embeddings_and_output_weights"],
        qkv_bias=arguments.get("add_qkv_bias", False),
        qk_norm=arguments["qk_layernorm"],
        q_lora=arguments.get("q_lora_rank") is not None,
        num_experts=arguments["num_experts"] or 0,
        expert_layers=tuple(map(bool, arguments.get("moe_layer_freq", ()))),
    )


def megatron_tensors(
    model_type: str, names: NameMap, checkpoint: HFCheckpoint, spelling: int = 0
) -> dict[str, torch.Tensor]:
    """All whole Megatron tensors of the checkpoint, by one of their spellings."""
    found = {}
    for entry in FAMILIES[model_type]:
        template = entry.megatron[min(spelling, len(entry.megatron) - 1)]
        for layer in range(names.shape.num_layers if "{layer}" in template else 1):
            if entry.present(names.shape, layer):
                for expert in range(names.shape.num_experts if "{expert}" in template else 1):
                    name = template.format(layer=layer, expert=expert)
                    found[name] = names[name].from_hf(checkpoint.tensor)
    return found


def check_inverse(directory: Path, model_shape: ModelShape, spelling: int) -> None:
    """Loading and then exporting the checkpoint gives it back, name by name and bit by bit."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    checkpoint, names = HFCheckpoint(directory), NameMap(model_type, model_shape)
    tensors = megatron_tensors(model_type, names, checkpoint, spelling)
    exported = dict(Exporter([(name, Parameter(t)) for name, t in tensors.items()], names, max_bytes=1 << 20)())
    assert (
        exported.keys()
        == set(names.hf_names)
        == set(checkpoint.names()) - ({"lm_head.weight"} if model_shape.tied else set())
    )
    for name, tensor in exported.items():
        assert torch.equal(tensor, checkpoint.tensor(name)), name


@pytest.fixture(scope="module")
def family_dirs(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {name: make_family(place / str(row), name) for row, name in enumerate(MODELS_OF_FAMILIES)}


@pytest.mark.parametrize(("family", "tied"), MODELS)
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_loading_and_export_are_inverse_and_complete(tiny_model_dir, family, tied, spelling):
    check_inverse(tiny_model_dir(family, tied=tied), shape(tied), spelling)


@pytest.mark.parametrize("family", MODELS_OF_FAMILIES)
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_every_family_is_loaded_and_exported_whole(family_dirs, family, spelling):
    check_inverse(family_dirs[family], shape_of(family_dirs[family]), spelling)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_stacked_experts_are_read_as_single_ones(family_dirs, tmp_path, family):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(family_dirs[family], dtype="float32")
    model.save_pretrained(tmp_path, save_original_format=False)
    stacked, single = HFCheckpoint(tmp_path), HFCheckpoint(family_dirs[family])
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "model.layers.1.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118
    assert set(stacked.names()) == set(single.names())
    for name in single.names():
        assert stacked.shape(name) == single.shape(name)
        assert torch.equal(stacked.tensor(name), single.tensor(name)), name


@pytest.mark.parametrize(
    ("local", "of_rank_1"),
    [
        ("decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight", "local_experts.6.linear_fc1.weight"),
        ("decoder.layers.3.mlp.experts.linear_fc2.weight2", "experts.linear_fc2.weight6"),
        ("decoder.layers.3.mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.linear_fc2.weight"),
        ("decoder.layers.3.mlp.linear_fc2.weight", "mlp.linear_fc2.weight"),
    ],
)
def test_experts_are_counted_over_all_ranks(local, of_rank_1):
    """Four experts a rank."""
    assert with_global_expert(local, 0) == local
    assert with_global_expert(local, 4).endswith(of_rank_1)


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
