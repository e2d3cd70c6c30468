"""The model's weights under their Hugging Face names: taken in, packed, and given back. slots.py says which there are.

A `WeightStore` takes tensors one by one in any order (from safetensors files, or from a weight update) and installs
each packed matrix as soon as all of its parts are there, so that next to the packed weights only the parts of an
unfinished matrix are in memory. `dense()` unpacks exactly what the engine computes with: checksums are made of that,
not of a copy that may have fallen behind.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from colloid.engines.checksums import tensor_checksum
from colloid.engines.embedded.linear import PackedLinear
from colloid.engines.embedded.model import Model
from colloid.engines.embedded.slots import HEAD, LAYERS, Part, Slot, make_slots
from colloid.errors import ConfigError, WeightSyncError


class WeightStore:
    """Fills a `Model` with weights. Raises WeightSyncError for tensors that don't fit it."""

    def __init__(self, model: Model):
        self.model = model
        self._slots = make_slots(model)
        self._slot_of = {part.name: (slot, part) for slot in self._slots for part in slot.parts}
        self._received: set[str] = set()
        self._tied_head_checksum: str | None = None

    @property
    def names(self) -> list[str]:
        return list(self._slot_of)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """What a tensor is held in; None where the model keeps none of that name."""
        return self._slot_of[name][0].dtype if name in self._slot_of else None

    def begin(self) -> None:
        """Starts a complete replacement: from now until `finish` the weights are a mixture."""
        self._received.clear()
        self._tied_head_checksum = None
        for slot in self._slots:
            slot.staged.clear()

    def drop(self) -> None:
        """Frees all weights; they are there again after a complete replacement."""
        self.begin()
        for slot in self._slots:
            setattr(slot.owner, slot.attribute, None)
        self.model.head = None

    def receive(self, name: str, tensor: torch.Tensor, *, copy: bool = True) -> None:
        """Takes one tensor, of any float dtype. `copy`: its memory is someone else's, who changes it later."""
        if name == HEAD and self.model.config.tied_embeddings:
            self._tied_head_checksum = tensor_checksum(tensor.to(self.model.dtype))
            return
        if name not in self._slot_of:
            raise WeightSyncError(f"the model has no tensor {name!r}; it has {len(self._slot_of)}, {self._some()}")
        slot, part = self._slot_of[name]
        if tuple(tensor.shape) != part.shape:
            raise WeightSyncError(f"{name} has shape {list(tensor.shape)}, the model's is {list(part.shape)}")
        if name in self._received:
            raise WeightSyncError(f"{name} was sent twice in one update")
        self._received.add(name)
        slot.staged[name] = tensor.to(slot.dtype, copy=copy)
        if len(slot.staged) == len(slot.parts):
            self._install(slot)

    def finish(self) -> None:
        """Raises unless every tensor of the model was received since `begin`."""
        missing = [name for name in self._slot_of if name not in self._received]
        if missing:
            shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            raise WeightSyncError(f"{len(missing)} of {len(self._slot_of)} tensors are missing: {shown}")
        if self._tied_head_checksum not in (None, tensor_checksum(self.model.embedding)):
            raise WeightSyncError(f"{HEAD} differs from model.embed_tokens.weight, but the model ties them")

    def check_patch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises unless values of this dtype can be patched into that tensor, losing nothing."""
        if name not in self._slot_of:
            raise WeightSyncError(f"the model has no tensor {name!r}; it has {len(self._slot_of)}, {self._some()}")
        slot, part = self._slot_of[name]
        if shape != part.shape:
            raise WeightSyncError(f"{name} has shape {list(shape)}, the model's is {list(part.shape)}")
        if dtype.itemsize > slot.dtype.itemsize:
            raise WeightSyncError(
                f"{name} changes in {dtype}, but the model holds it in {slot.dtype}: send all weights"
            )

    def patch(self, names: list[str], patched: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        """Replaces some tensors by what is made of their values; those for which that is None stay.

        Args:
            patched: `(name, current values)`, called once a name; returns memory of its own.
        """
        wanted: dict[int, tuple[Slot, list[str]]] = {}
        for name in names:
            slot = self._slot_of[name][0]
            wanted.setdefault(id(slot), (slot, []))[1].append(name)
        for slot, of_slot in wanted.values():
            slot.staged = dict(self._unpack(slot))
            for name in of_slot:
                made = patched(name, slot.staged[name])
                if made is not None:
                    slot.staged[name] = made.to(slot.dtype)
            self._install(slot)

    def dense(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor in the engine's dtype) of every tensor, unpacked from what the model computes with.

        One kind of tensor is in float32 in any engine: e_score_correction_bias, of routers.
        """
        for slot in self._slots:
            yield from self._unpack(slot)

    def checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in self.dense()}

    def _some(self) -> str:
        return ", ".join(list(self._slot_of)[:3]) + ", …"

    def _install(self, slot: Slot) -> None:
        # The old weight goes before the new one comes: the allocator reuses its place, and memory stays flat.
        setattr(slot.owner, slot.attribute, None)
        weight, bias = (_join(slot, parts) for parts in (slot.weights, slot.biases))
        if slot.is_linear:
            weight = PackedLinear(weight.to(slot.compute_dtype), bias)
        setattr(slot.owner, slot.attribute, weight)
        if slot.attribute == "embedding" and self.model.config.tied_embeddings:
            self.model.head = None
            self.model.head = PackedLinear(weight.to(self.model.head_dtype))

    def _unpack(self, slot: Slot) -> Iterator[tuple[str, torch.Tensor]]:
        value = getattr(slot.owner, slot.attribute)
        if value is None:
            raise WeightSyncError(f"{slot.parts[0].name} has no value: a weight update was not completed")
        whole = value.dense().to(slot.dtype) if slot.is_linear else value
        for parts, tensor in ((slot.weights, whole), (slot.biases, getattr(value, "bias", None))):
            if parts:
                pieces = tensor.split([p.shape[0] for p in parts])
                for part, piece in zip(parts, pieces, strict=True):
                    yield part.name, _reorder(piece.contiguous(), part.original_order)


def _join(slot: Slot, parts: list[Part]) -> torch.Tensor | None:
    pieces = [_reorder(slot.staged.pop(part.name), part.row_order) for part in parts]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else None


def _reorder(tensor: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Permutes the rows within each head."""
    if order is None:
        return tensor
    return tensor.view(-1, len(order), *tensor.shape[1:])[:, order].reshape(tensor.shape)


def load_weights(store: WeightStore, model_path: str | Path) -> None:
    """Reads every tensor of a Hugging Face directory (one safetensors file, or shards with an index)."""
    store.begin()
    try:
        for name, tensor in read_safetensors(model_path):
            if not is_unused(name, store.model.config.num_layers):
                store.receive(name, tensor)
        store.finish()
    except WeightSyncError as error:
        raise ConfigError(f"the weights in {model_path} do not fit its config.json: {error}") from error


def is_unused(name: str, num_layers: int) -> bool:
    """Stored RoPE frequencies, and the layers behind the last one, which predict further tokens (MTP)."""
    number = name.removeprefix(LAYERS).split(".")[0] if name.startswith(LAYERS) else "0"
    return name.endswith("rotary_emb.inv_freq") or int(number) >= num_layers


def read_safetensors(model_path: str | Path) -> Iterable[tuple[str, torch.Tensor]]:
    directory = Path(model_path)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if any(Path(file).name != file for file in files):
            raise ConfigError(f"{index} names files outside of its directory")
    elif (directory / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise ConfigError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
    for file in files:
        with safe_open(directory / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tensors.get_tensor(name)
