"""Typed messages of weight updates that don't come through shared memory: through a process group, and from disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from colloid.engines.contract import ITEM_SIZES, TensorDescriptor
from colloid.engines.contract_fields import BadRequest, as_integer, as_number, as_object, as_string, as_token_ids, shown
from colloid.engines.process_group import BACKENDS

LOAD_FORMATS = ("auto", "safetensors", "delta")


@dataclass(frozen=True)
class GroupStart:
    """A group that the engine joins as rank `rank_offset`."""

    host: str
    port: int
    rank: int
    size: int
    name: str
    backend: str
    timeout: float = 300.0
    """Seconds for all ranks to join, and for one tensor to come. Not SGLang's."""

    @classmethod
    def from_json(cls, body: Any) -> GroupStart:
        body = as_object(body, "the request")
        backend = body.get("backend", "nccl")
        if backend not in BACKENDS:
            raise BadRequest(f"backend must be one of {', '.join(BACKENDS)}, got {shown(backend)}")
        size = as_integer(body.get("world_size"), "world_size", 2, 1 << 20)
        return cls(
            host=as_string(body.get("master_address"), "master_address"),
            port=as_integer(body.get("master_port"), "master_port", 1, 65535),
            rank=as_integer(body.get("rank_offset"), "rank_offset", 1, size - 1),
            size=size,
            name=group_name(body),
            backend=backend,
            timeout=as_number(body.get("timeout", 300.0), "timeout", 1.0, 3600.0),
        )


@dataclass(frozen=True)
class BroadcastBucket:
    """Tensors that are broadcast one after another. `checksum`: xxh3_128 of all their bytes, or empty."""

    weight_version: str
    group: str
    tensors: tuple[TensorDescriptor, ...] = field(repr=False)
    checksum: str = ""

    @classmethod
    def from_json(cls, body: Any) -> BroadcastBucket:
        body = as_object(body, "the request")
        lists = [body.get(name) for name in ("names", "dtypes", "shapes")]
        if not all(isinstance(each, list) and each for each in lists) or len({len(each) for each in lists}) != 1:
            raise BadRequest("names, dtypes and shapes must be lists of the same length that are not empty")
        if body.get("load_format") is not None:
            raise BadRequest(f"load_format must be left out: tensors come one by one, got {shown(body['load_format'])}")
        checksum = body.get("checksum")
        return cls(
            weight_version=as_string(body.get("weight_version"), "weight_version"),
            group=group_name(body),
            tensors=tuple(_described(*each) for each in zip(*lists, strict=True)),
            checksum="" if checksum is None else as_string(checksum, "checksum"),
        )


def group_name(body: Any) -> str:
    """The name of the group that a request is about."""
    name = as_object(body, "the request").get("group_name")
    return "weight_update_group" if name is None else as_string(name, "group_name")


def _described(name: Any, dtype: Any, shape: Any) -> TensorDescriptor:
    name = as_string(name, "names")
    dtype = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    shape = tuple(as_integer(n, f"{name}: shape", 1, 2**40) for n in as_token_ids(shape, f"{name}: shape"))
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise BadRequest(f"{name}: dtype must be one of {', '.join(ITEM_SIZES)}, got {shown(dtype)}")
    return TensorDescriptor(name, dtype, shape, 0)


@dataclass(frozen=True)
class DiskUpdate:
    """A directory of weights to read. `is_delta`: it holds what changed since another version."""

    path: str
    is_delta: bool
    weight_version: str | None

    @classmethod
    def from_json(cls, body: Any) -> DiskUpdate:
        body = as_object(body, "the request")
        load_format = body.get("load_format") or "auto"
        if load_format not in LOAD_FORMATS:
            raise BadRequest(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {shown(load_format)}")
        version = body.get("weight_version")
        return cls(
            path=as_string(body.get("model_path"), "model_path"),
            is_delta=load_format == "delta",
            weight_version=None if version is None else as_string(version, "weight_version"),
        )
