"""The messages of the rollout engine's HTTP contract (SGLang's names), parsed and checked: what controls an engine.

`X.from_json(body)` takes what `json.loads` gave and returns a frozen record, or raises `BadRequest`, whose message is
written for the sender and which a server answers with 400. Beside this module: contract_generate.py (/generate),
contract_openai.py, contract_weights.py.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from colloid.engines.contract_fields import (
    BadRequest,
    as_boolean,
    as_integer,
    as_object,
    as_string,
    as_token_ids,
    shown,
)
from colloid.engines.shared_ring import MAX_READERS

ITEM_SIZES = {"float32": 4, "bfloat16": 2}
"""Dtypes that weights are sent in -> bytes of an element."""


@dataclass(frozen=True)
class AbortRequest:
    rid: str
    abort_all: bool

    @classmethod
    def from_json(cls, body: Any) -> "AbortRequest":
        body = as_object(body, "the request")
        rid = "" if body.get("rid") is None else as_string(body["rid"], "rid")
        abort_all = False if body.get("abort_all") is None else as_boolean(body["abort_all"], "abort_all")
        if not rid and not abort_all:
            raise BadRequest("give a rid, or abort_all: true")
        return cls(rid, abort_all)


PAUSE_MODES = ("in_place", "retract", "abort")


@dataclass(frozen=True)
class PauseRequest:
    """in_place keeps the cache, retract recomputes it on continuing, abort answers all requests now."""

    mode: str

    @classmethod
    def from_json(cls, body: Any) -> "PauseRequest":
        mode = as_object({} if body is None else body, "the request").get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {shown(mode)}")
        return cls(mode)


@dataclass(frozen=True)
class TensorDescriptor:
    """Where in its bucket one tensor lies: `offset` in bytes, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def from_json(cls, body: Any, size: int) -> "TensorDescriptor":
        body = as_object(body, "each of tensors")
        name = as_string(body.get("name"), "tensors: name")
        dtype = body.get("dtype")
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise BadRequest(f"{name}: dtype must be one of {', '.join(ITEM_SIZES)}, got {shown(dtype)}")
        shape = tuple(
            as_integer(n, f"{name}: shape", 1, 2**40) for n in as_token_ids(body.get("shape"), f"{name}: shape")
        )
        offset = as_integer(body.get("offset"), f"{name}: offset", 0)
        item = ITEM_SIZES[dtype]
        if not shape or offset % item or offset + math.prod(shape) * item > size:
            raise BadRequest(f"{name}: {dtype} {list(shape)} at byte {offset} does not lie aligned in {size} bytes")
        return cls(name, dtype, shape, offset)


@dataclass(frozen=True)
class WeightUpdateStart:
    weight_version: str

    @classmethod
    def from_json(cls, body: Any) -> "WeightUpdateStart":
        return cls(as_string(as_object(body, "the request").get("weight_version"), "weight_version"))


@dataclass(frozen=True)
class WeightUpdateBucket:
    """Some tensors that come through shared memory, see `colloid.engines.shared_ring`.

    `size` bytes with the tensors at their offsets pass through it from position `begin` on, and after them the xxh3_128
    of all tensors' bytes. `reader`: where in the header this engine says how far it is.
    """

    weight_version: str
    path: str
    size: int
    begin: int
    reader: int
    tensors: tuple[TensorDescriptor, ...] = field(repr=False)

    @classmethod
    def from_json(cls, body: Any) -> "WeightUpdateBucket":
        body = as_object(body, "the request")
        memory = as_object(body.get("shared_memory"), "shared_memory")
        size = as_integer(memory.get("size"), "shared_memory: size", 1)
        tensors = body.get("tensors")
        if not isinstance(tensors, list) or not tensors:
            raise BadRequest("tensors must be a list that is not empty")
        return cls(
            weight_version=as_string(body.get("weight_version"), "weight_version"),
            path=as_string(memory.get("path"), "shared_memory: path"),
            size=size,
            begin=as_integer(memory.get("begin"), "shared_memory: begin", 0),
            reader=as_integer(memory.get("reader"), "shared_memory: reader", 0, MAX_READERS - 1),
            tensors=tuple(TensorDescriptor.from_json(t, size) for t in tensors),
        )


@dataclass(frozen=True)
class WeightUpdateEnd:
    weight_version: str
    num_tensors: int

    @classmethod
    def from_json(cls, body: Any) -> "WeightUpdateEnd":
        body = as_object(body, "the request")
        version = as_string(body.get("weight_version"), "weight_version")
        return cls(version, as_integer(body.get("num_tensors"), "num_tensors", 1))
