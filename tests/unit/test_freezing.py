from types import SimpleNamespace

import pytest
import torch

from colloid.errors import ConfigError
from colloid.training.megatron.freezing import freeze

HF = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.layers.0.self_attention.linear_qkv.weight": (
        "model.layers.0.q_proj.weight",
        "model.layers.0.k_proj.weight",
    ),
    "decoder.layers.1.mlp.linear_fc2.weight": ("model.layers.1.down_proj.weight",),
}


class Names:
    """What `freeze` uses of a name map."""

    def __getitem__(self, name):
        return SimpleNamespace(hf_names=HF[name], entry=SimpleNamespace(exported=True))


def trained(only=None, frozen=None):
    parameters = [(name, torch.nn.Parameter(torch.zeros(1))) for name in HF]
    freeze(parameters, Names(), only, frozen)
    return [name for name, parameter in parameters if parameter.requires_grad]


def test_patterns_are_found_in_megatrons_names_and_in_hugging_faces():
    names = list(HF)
    assert trained(only=["linear_qkv"]) == trained(only=["k_proj"]) == [names[1]]
    assert trained(frozen=[r"layers\.\d"]) == [names[0]]
    assert trained(frozen=["embed_tokens", "down_proj"]) == [names[1]]


def test_a_pattern_without_a_parameter_and_nothing_left_to_train_are_errors():
    message = (
        "--only-train-params-name-list: no parameter's name has 'lienar_qkv'; near it are decoder.layers.0.self_att"
    )
    with pytest.raises(ConfigError, match=message):
        trained(only=["linear", "lienar_qkv"])
    with pytest.raises(ConfigError, match="freezes every parameter"):
        trained(frozen=["."])
