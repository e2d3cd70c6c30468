"""The model's weights under their Hugging Face names: which there must be, how they are packed, and back.

A `WeightStore` takes tensors one by one in any order (from safetensors files, or from a weight update) and installs
each packed matrix as soon as all of its parts are there, so that next to the packed weights only the parts of an
unfinished matrix are in memory. `dense()` unpacks exactly what the engine computes with: checksums are made of that,
not of a copy that may have fallen behind.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from colloid.engines.embedded.model import Model, PackedLinear, interleave_rotated_pairs
from colloid.errors import ConfigError, WeightSyncError

TIED_HEAD = "lm_head.weight"


def tensor_checksum(tensor: torch.Tensor) -> str:
    """xxh3_128 (hexadecimal) of a tensor's raw little-endian bytes, row-major."""
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy())


@dataclass
class _Part:
    """One HF tensor. `rotated_heads`: its rows are those of heads that RoPE rotates."""

    name: str
    shape: tuple[int, ...]
    rotated: bool = False


@dataclass
class _Slot:
    """One attribute of the model and the HF tensors that it is made of: weights first, then biases."""

    owner: object
    attribute: str
    weights: list[_Part]
    biases: list[_Part] = field(default_factory=list)
    staged: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def parts(self) -> list[_Part]:
        return self.weights + self.biases


class WeightStore:
    """Fills a `Model` with weights. Raises WeightSyncError for tensors that don't fit it."""

    def __init__(self, model: Model):
        self.model = model
        self._order = interleave_rotated_pairs(model.config.head_dim)
        self._inverse = torch.argsort(self._order)
        self._slots = _slots(model)
        self._slot_of = {part.name: (slot, part) for slot in self._slots for part in slot.parts}
        self._received: set[str] = set()
        self._tied_head_checksum: str | None = None

    @property
    def names(self) -> list[str]:
        return list(self._slot_of)

    def begin(self) -> None:
        """Starts a complete replacement: from now until `finish` the weights are a mixture."""
        self._received.clear()
        self._tied_head_checksum = None
        for slot in self._slots:
            slot.staged.clear()

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one tensor (any float dtype; copied, never kept)."""
        if name == TIED_HEAD and self.model.config.tied_embeddings:
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
        slot.staged[name] = tensor.to(self.model.dtype, copy=True)
        if len(slot.staged) == len(slot.parts):
            self._install(slot)

    def finish(self) -> None:
        """Raises unless every tensor of the model was received since `begin`."""
        missing = [name for name in self._slot_of if name not in self._received]
        if missing:
            shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            raise WeightSyncError(f"{len(missing)} of {len(self._slot_of)} tensors are missing: {shown}")
        if self._tied_head_checksum not in (None, tensor_checksum(self.model.embedding)):
            raise WeightSyncError(f"{TIED_HEAD} differs from model.embed_tokens.weight, but the model ties them")

    def dense(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor in the engine's dtype) of every tensor, unpacked from what the model computes with."""
        for slot in self._slots:
            yield from self._unpack(slot)

    def checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in self.dense()}

    def _some(self) -> str:
        return ", ".join(list(self._slot_of)[:3]) + ", …"

    def _install(self, slot: _Slot) -> None:
        # The old weight goes before the new one comes: the allocator reuses its place, and memory stays flat.
        setattr(slot.owner, slot.attribute, None)
        weight, bias = (self._join(slot, parts) for parts in (slot.weights, slot.biases))
        if slot.attribute == "embedding":
            self.model.embedding = weight
            if self.model.config.tied_embeddings:
                self.model.head = None
                self.model.head = PackedLinear(weight.to(self.model.head_dtype))
        elif weight.dim() == 1:
            setattr(slot.owner, slot.attribute, weight)
        else:
            weight = weight.to(self.model.head_dtype) if slot.attribute == "head" else weight
            setattr(slot.owner, slot.attribute, PackedLinear(weight, bias))

    def _join(self, slot: _Slot, parts: list[_Part]) -> torch.Tensor | None:
        pieces = [self._reorder(slot.staged.pop(part.name), part, self._order) for part in parts]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else None

    def _reorder(self, tensor: torch.Tensor, part: _Part, order: torch.Tensor) -> torch.Tensor:
        """Permutes the rows within each head, where RoPE rotates them."""
        if not part.rotated:
            return tensor
        return tensor.view(-1, self.model.config.head_dim, *tensor.shape[1:])[:, order].reshape(tensor.shape)

    def _unpack(self, slot: _Slot) -> Iterator[tuple[str, torch.Tensor]]:
        value = getattr(slot.owner, slot.attribute)
        if value is None:
            raise WeightSyncError(f"{slot.parts[0].name} has no value: a weight update was not completed")
        whole = value.dense().to(self.model.dtype) if isinstance(value, PackedLinear) else value
        for parts, tensor in ((slot.weights, whole), (slot.biases, getattr(value, "bias", None))):
            if parts:
                pieces = tensor.split([p.shape[0] for p in parts])
                for part, piece in zip(parts, pieces, strict=True):
                    yield part.name, self._reorder(piece.contiguous(), part, self._inverse)


def _slots(model: Model) -> list[_Slot]:
    c = model.config
    queries, keys, hidden, inner = (
        c.num_heads * c.head_dim,
        c.num_kv_heads * c.head_dim,
        c.hidden_size,
        c.intermediate_size,
    )
    qkv = (("self_attn.q_proj", queries, True), ("self_attn.k_proj", keys, True), ("self_attn.v_proj", keys, False))
    gate_up = (("mlp.gate_proj", inner, False), ("mlp.up_proj", inner, False))
    slots = [_Slot(model, "embedding", [_Part("model.embed_tokens.weight", (c.vocab_size, hidden))])]
    for i, layer in enumerate(model.layers):
        base = f"model.layers.{i}."
        slots += [
            _Slot(layer, "input_norm", [_Part(f"{base}input_layernorm.weight", (hidden,))]),
            _linear_slot(layer, "qkv", base, qkv, hidden, c.qkv_bias),
            _linear_slot(layer, "output", base, (("self_attn.o_proj", hidden, False),), queries, c.output_bias),
            _Slot(layer, "post_attention_norm", [_Part(f"{base}post_attention_layernorm.weight", (hidden,))]),
            _linear_slot(layer, "gate_up", base, gate_up, hidden, c.mlp_bias),
            _linear_slot(layer, "down", base, (("mlp.down_proj", hidden, False),), inner, c.mlp_bias),
        ]
        if c.qk_norm:
            slots += [
                _Slot(layer, name, [_Part(f"{base}self_attn.{name}.weight", (c.head_dim,), True)])
                for name in ("q_norm", "k_norm")
            ]
    slots.append(_Slot(model, "final_norm", [_Part("model.norm.weight", (hidden,))]))
    if not c.tied_embeddings:
        slots.append(_Slot(model, "head", [_Part(TIED_HEAD, (c.vocab_size, hidden))]))
    return slots


def _linear_slot(
    layer: object, attribute: str, base: str, parts: tuple[tuple[str, int, bool], ...], width: int, bias: bool
) -> _Slot:
    """parts: (HF module, rows, whether RoPE rotates them), stacked along the rows into one matrix."""
    weights = [_Part(f"{base}{name}.weight", (rows, width), rotated) for name, rows, rotated in parts]
    biases = [_Part(f"{base}{name}.bias", (rows,), rotated) for name, rows, rotated in parts if bias]
    return _Slot(layer, attribute, weights, biases)


def load_weights(store: WeightStore, model_path: str | Path) -> None:
    """Reads every tensor of a Hugging Face directory (one safetensors file, or shards with an index)."""
    store.begin()
    try:
        for name, tensor in read_safetensors(model_path):
            if not name.endswith("rotary_emb.inv_freq"):
                store.receive(name, tensor)
        store.finish()
    except WeightSyncError as error:
        raise ConfigError(f"the weights in {model_path} do not fit its config.json: {error}") from error


def read_safetensors(model_path: str | Path) -> Iterable[tuple[str, torch.Tensor]]:
    directory = Path(model_path)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (directory / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise ConfigError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
    for file in files:
        with safe_open(directory / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tensors.get_tensor(name)


def weight_bytes(model: Model) -> int:
    """Bytes of all weights in the engine's dtype (the head of tied embeddings is a second copy)."""
    size = sum(math.prod(part.shape) for slot in _slots(model) for part in slot.parts)
    if model.config.tied_embeddings:
        size += model.config.vocab_size * model.config.hidden_size
    return size * model.dtype.itemsize
