"""Hugging Face checkpoints: reading their tensors, and filling this rank's Megatron parameters with them.

The way back is `colloid.weights.export`, through the same name table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from colloid.errors import CheckpointError, ConfigError
from colloid.weights.names import NameMap
from colloid.weights.shards import WHOLE, Coordinates
from colloid.weights.stacked import Slice, is_stacked, single_experts

NamedParameters = list[tuple[str, torch.nn.Parameter]]
"""Megatron names, with the layer counted over the whole model, and this rank's shards."""

IGNORED = ("lm_head.weight", "rotary_emb.inv_freq")
"""Endings of names that a checkpoint may hold besides the model's: a tied head, a buffer of old versions."""


class HFCheckpoint:
    """The tensors of a directory with `model.safetensors`, or with shards and an index.

    Raises:
        CheckpointError: no safetensors there, or a file that cannot be read. Names the file.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        index = self.directory / "model.safetensors.index.json"
        single = self.directory / "model.safetensors"
        if index.exists():
            try:
                files = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"{index} is not an index of safetensors: {error}") from error
        elif single.exists():
            with _open(single) as handle:
                files = dict.fromkeys(handle.keys(), single.name)
        else:
            raise CheckpointError(f"{self.directory} has neither model.safetensors nor model.safetensors.index.json")
        self._files: dict[str, str] = files
        self._handles: dict[str, Any] = {}
        self._slices: dict[str, Slice] = {}
        for name in filter(is_stacked, files):
            self._slices |= single_experts(name, self.shape(name))

    def names(self) -> list[str]:
        """Of all tensors; those of experts singly, also where the files have them stacked."""
        return [name for name in self._files if not is_stacked(name)] + list(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor, which is not read for it."""
        part = self._slices.get(name)
        if part is not None:
            return part.end - part.begin, *self.shape(part.name)[2:]
        return tuple(self._handle(name).get_slice(name).get_shape())

    def extra_layers(self) -> tuple[str, ...]:
        """Prefixes of layers past the model's own: those of multi-token prediction, by the directory's config."""
        path = self.directory / "config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        first, count = config.get("num_hidden_layers", 0), config.get("num_nextn_predict_layers") or 0
        return tuple(f"model.layers.{layer}." for layer in range(first, first + count))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype of the file."""
        part = self._slices.get(name)
        stored = name if part is None else part.name
        try:
            handle = self._handle(stored)
            return (
                handle.get_tensor(name)
                if part is None
                else handle.get_slice(stored)[part.expert, part.begin : part.end]
            )
        except SafetensorError as error:
            file = self.directory / self._files[stored]
            raise CheckpointError(f"{file}: tensor {name!r} cannot be read: {error}") from error

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = _open(self.directory / file)
        return self._handles[file]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


@torch.no_grad()
def load_parameters(
    parameters: NamedParameters, names: NameMap, checkpoint: HFCheckpoint, coordinates: Coordinates = WHOLE
) -> None:
    """Fills this rank's shards from a Hugging Face checkpoint, one parameter at a time.

    Raises:
        ConfigError: names or shapes of the checkpoint are not those of the model; lists the first that differ.
    """
    check_fit(parameters, names, checkpoint, coordinates)
    for name, parameter in parameters:
        mapped = names[name]
        parameter.data.copy_(mapped.entry.shard.cut(mapped.from_hf(checkpoint.tensor), *coordinates.shard(name)))


def check_fit(parameters: NamedParameters, names: NameMap, checkpoint: HFCheckpoint, coordinates: Coordinates) -> None:
    """Compares names with the whole model, and shapes with the parameters that are here. Reads no tensor.

    Raises:
        ConfigError: lists the first tensors that differ, with their shapes.
    """
    present, expected = set(checkpoint.names()), set(names.hf_names)
    ignored = checkpoint.extra_layers()
    missing = [name for name in names.hf_names if name not in present]
    extra = sorted(
        name for name in present - expected if not name.endswith(IGNORED) and not (ignored and name.startswith(ignored))
    )
    if missing or extra:
        raise ConfigError(
            f"the weights in {checkpoint.directory} do not fit its config: missing {some(missing)}, "
            f"unexpected {some(extra)}"
        )
    different = []
    for name, parameter in parameters:
        for hf_name, shape in hf_shapes(name, parameter, names, coordinates):
            if checkpoint.shape(hf_name) != shape:
                different.append(f"{hf_name} is {checkpoint.shape(hf_name)} where the model has {shape}")
    if different:
        raise ConfigError(f"the weights in {checkpoint.directory} do not fit the config: {some(different, '; ')}")


def hf_shapes(
    name: str, parameter: torch.Tensor, names: NameMap, coordinates: Coordinates
) -> list[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of the whole tensors that a parameter's shards make."""
    mapped, count = names[name], coordinates.shard(name)[1]
    shard = torch.empty(parameter.shape, device="meta")
    return [
        (hf_name, tuple(tensor.shape)) for hf_name, tensor in mapped.to_hf(mapped.entry.shard.join([shard] * count))
    ]


def some(names: Iterable[str], separator: str = ", ") -> str:
    """The first few, and how many more."""
    names = list(names)
    if not names:
        return "none"
    return separator.join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
