"""Hugging Face checkpoints: reading their tensors, and filling Megatron parameters with them and back.

`load_parameters` and `export_parameters` go through the same name table and are each other's inverse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from colloid.errors import CheckpointError, ConfigError
from colloid.weights.names import NameMap

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

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype of the file."""
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = _open(self.directory / file)
        try:
            return self._handles[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory / file}: tensor {name!r} cannot be read: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


@torch.no_grad()
def load_parameters(
    parameters: NamedParameters, names: NameMap, checkpoint: HFCheckpoint, *, tp_rank: int = 0, tp_size: int = 1
) -> None:
    """Fills this rank's shards from a Hugging Face checkpoint, one parameter at a time.

    Raises:
        ConfigError: names or shapes of the checkpoint are not those of the model; lists the first that differ.
    """
    present, expected = set(checkpoint.names()), set(names.hf_names)
    missing = [name for name in names.hf_names if name not in present]
    extra = sorted(name for name in present - expected if not name.endswith(IGNORED))
    if missing or extra:
        raise ConfigError(
            f"the weights in {checkpoint.directory} do not fit its config: missing {_some(missing)}, "
            f"unexpected {_some(extra)}"
        )
    for name, parameter in parameters:
        mapped = names[name]
        try:
            shard = mapped.entry.shard.cut(mapped.from_hf(checkpoint.tensor), tp_rank, tp_size)
        except RuntimeError as error:
            raise ConfigError(
                f"{checkpoint.directory}: {_some(mapped.hf_names)} cannot be combined: {error}"
            ) from error
        if shard.shape != parameter.shape:
            raise ConfigError(
                f"{checkpoint.directory}: {_some(mapped.hf_names)} make {tuple(shard.shape)} where the model's {name} "
                f"has {tuple(parameter.shape)}: the config does not fit the weights"
            )
        parameter.data.copy_(shard)


@torch.no_grad()
def export_parameters(
    parameters: NamedParameters, names: NameMap, *, tp_group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields Hugging Face names and whole tensors of this pipeline stage, one parameter at a time.

    Collective over `tp_group`: every rank of it has to exhaust the iterator. The tensors may be views of parameters.
    """
    for name, parameter in parameters:
        mapped = names[name]
        if not mapped.entry.exported:
            continue
        parts = [parameter.data]
        if tp_group is not None and tp_group.size() > 1:
            parts = [torch.empty_like(parameter.data) for _ in range(tp_group.size())]
            dist.all_gather(parts, parameter.data, group=tp_group)
        yield from mapped.to_hf(mapped.entry.shard.join(parts))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
