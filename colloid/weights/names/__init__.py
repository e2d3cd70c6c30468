"""Hugging Face names <-> Megatron names, one table a model family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from colloid.errors import ConfigError
from colloid.weights.names import llama, qwen2, qwen3
from colloid.weights.names.table import Entry, ModelShape, Shard

__all__ = ["FAMILIES", "ModelShape", "NameMap", "Parameter", "Shard"]

FAMILIES: dict[str, list[Entry]] = {"llama": llama.TABLE, "qwen2": qwen2.TABLE, "qwen3": qwen3.TABLE}
"""By `model_type` of the Hugging Face config."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An entry of one layer: a Megatron parameter and its Hugging Face tensors."""

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
            per_layer = "{layer}" in entry.hf[0]
            for layer in range(shape.num_layers if per_layer else 1):
                hf_names = tuple(name.format(layer=layer) for name in entry.hf)
                parameter = Parameter(hf_names, entry, shape)
                self._parameters.update({name.format(layer=layer): parameter for name in entry.megatron})
                if entry.exported:
                    self.hf_names.extend(hf_names)

    def __getitem__(self, megatron_name: str) -> Parameter:
        """The parameter of this name, with the layer counted over the whole model.

        Raises:
            ConfigError: the family has no such parameter.
        """
        if megatron_name not in self._parameters:
            raise ConfigError(f"the name table of this model family has no Megatron parameter {megatron_name!r}")
        return self._parameters[megatron_name]
