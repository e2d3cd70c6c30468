"""Hugging Face names <-> Megatron names, one table a model family."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch

from colloid.errors import ConfigError
from colloid.weights.names import deepseek_v3, glm4, glm4_moe, llama, qwen2, qwen3, qwen3_moe
from colloid.weights.names.table import Entry, ModelShape, Shard

__all__ = ["FAMILIES", "ModelShape", "NameMap", "Parameter", "Shard", "with_global_expert"]

FAMILIES: dict[str, list[Entry]] = {
    "deepseek_v3": deepseek_v3.TABLE,
    "glm4": glm4.TABLE,
    "glm4_moe": glm4_moe.TABLE,
    "glm4_moe_lite": deepseek_v3.TABLE,
    "kimi_k2": deepseek_v3.TABLE,
    "llama": llama.TABLE,
    "qwen2": qwen2.TABLE,
    "qwen3": qwen3.TABLE,
    "qwen3_moe": qwen3_moe.TABLE,
}
"""By `model_type` of the Hugging Face config."""

_LOCAL_EXPERT = re.compile(r"(\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)")


def with_global_expert(megatron_name: str, first_expert: int) -> str:
    """The parameter's name with its expert, if it has one, counted over the whole model.

    Args:
        first_expert: of this expert-parallel rank.
    """
    return _LOCAL_EXPERT.sub(lambda found: f"{found[1]}{first_expert + int(found[2])}", megatron_name, count=1)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An entry of one layer (and expert): a Megatron parameter and its Hugging Face tensors."""

    hf_names: tuple[str, ...]
    entry: Entry
    shape: ModelShape

    def from_hf(self, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The whole Megatron tensor; `get` fetches a Hugging Face tensor by name."""
        return self.entry.transform.merge([get(name) for name in self.hf_names], self.shape)

    def to_hf(self, full: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The inverse of `from_hf`. The tensors may be views of `full`."""
        tensors = self.entry.transform.split(full, self.shape)
        return list(zip(self.hf_names, tensors, strict=True))


class NameMap:
    """The table of a family, laid out for one model.

    Args:
        model_type: of the Hugging Face config.

    Raises:
        ConfigError: no table for this family.
    """

    def __init__(self, model_type: str, shape: ModelShape):
        if model_type not in FAMILIES:
            raise ConfigError(
                f"models of type {model_type!r} are not supported yet; supported are {', '.join(sorted(FAMILIES))}"
            )
        self.shape = shape
        self._parameters: dict[str, Parameter] = {}
        self.hf_names: list[str] = []
        """Of every tensor that loading reads and export yields, in the order of the table."""
        for entry in FAMILIES[model_type]:
            if shape.tied and entry is llama.HEAD:
                # Only a pipeline's last stage has it: a copy of the embedding.
                entry = dataclasses.replace(entry, hf=llama.EMBEDDING.hf, exported=False)
            for layer in range(shape.num_layers if "{layer}" in entry.hf[0] else 1):
                if not entry.present(shape, layer):
                    continue
                for expert in range(shape.num_experts if entry.is_expert else 1):
                    hf_names = tuple(name.format(layer=layer, expert=expert) for name in entry.hf)
                    parameter = Parameter(hf_names, entry, shape)
                    for name in entry.megatron:
                        self._parameters[name.format(layer=layer, expert=expert)] = parameter
                    if entry.exported:
                        self.hf_names.extend(hf_names)

    def __getitem__(self, megatron_name: str) -> Parameter:
        """The parameter of this name, with layer and expert counted over the whole model.

        Raises:
            ConfigError: the family has no such parameter.
        """
        if megatron_name not in self._parameters:
            raise ConfigError(f"the name table of this model family has no Megatron parameter {megatron_name!r}")
        return self._parameters[megatron_name]
