"""The messages of the rollout engine's HTTP contract (SGLang's names), parsed and checked.

`X.from_json(body)` takes what `json.loads` gave and returns a frozen record, or raises `BadRequest`, whose message is
written for the sender and which a server answers with 400. What an engine cannot do is refused, never ignored:
fields of SGLang that ask for it are listed in `UNSUPPORTED` and may only hold their neutral value.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any

DEFAULT_MAX_NEW_TOKENS = 128
ITEM_SIZES = {"float32": 4, "bfloat16": 2}
"""Dtypes that weights are sent in -> bytes of an element."""

# SGLang's fields that the embedded engine has no answer to, with the values that ask for nothing.
UNSUPPORTED_FIELDS = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "lora_path": (None,),
    "lora_id": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "return_hidden_states": (None, False),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
}
UNSUPPORTED_PARAMETERS = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "logit_bias": (None, {}),
    "beam_width": (None, 1),
    "custom_params": (None,),
    "stream_interval": (None, 1),
    # A matter of slow tokenizers alone; a fast one adds none either way.
    "spaces_between_special_tokens": (None, True, False),
}


class BadRequest(ValueError):
    """The request is malformed or asks for what cannot be given; the message says what and what is allowed."""


def _object(body: Any, what: str) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest(f"{what} must be a JSON object, not {type(body).__name__}")
    return body


def _integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise BadRequest(f"{name} must be an integer {allowed}, got {_shown(value)}")
    return value


def _number(value: Any, name: str, low: float, high: float, *, low_open: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (low_open and value == low):
        raise BadRequest(f"{name} must be a number in {'(' if low_open else '['}{low}, {high}], got {_shown(value)}")
    return float(value)


def _boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {_shown(value)}")
    return value


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string, got {_shown(value)}")
    return value


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(token) is int for token in value):
        raise BadRequest(f"{name} must be a list of integers, got {_shown(value)}")
    return tuple(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse(body: dict[str, Any], unsupported: dict[str, tuple]) -> None:
    for name, neutral in unsupported.items():
        if name in body and body[name] not in neutral:
            raise BadRequest(f"{name} = {_shown(body[name])} is not supported by the embedded engine; leave it out")


@dataclass(frozen=True)
class SamplingParams:
    """How one sample is drawn. temperature 0 is greedy; top_k -1 means all; max_new_tokens None: up to the context."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    n: int = 1

    @classmethod
    def from_json(cls, body: Any) -> "SamplingParams":
        body = _object({} if body is None else body, "sampling_params")
        known = {f.name for f in fields(cls)}
        for name in body:
            if name not in known and name not in UNSUPPORTED_PARAMETERS:
                raise BadRequest(f"sampling_params has no {_shown(name)}; known are {', '.join(sorted(known))}")
        _refuse(body, UNSUPPORTED_PARAMETERS)
        given: dict[str, Any] = {}
        for name, value in body.items():
            if name in known and (value is not None or name == "max_new_tokens"):
                given[name] = _PARAMETER_PARSERS[name](value, name)
        params = cls(**given)
        if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
            raise BadRequest(
                f"min_new_tokens ({params.min_new_tokens}) is larger than max_new_tokens ({params.max_new_tokens})"
            )
        return params

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def filters(self) -> bool:
        """Whether tokens are cut off the distribution before drawing."""
        return self.top_p < 1.0 or self.top_k > 1 or self.min_p > 0.0


def _stop(value: Any, name: str) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise BadRequest(f"{name} must be a non-empty string or a list of them, got {_shown(value)}")
    return tuple(strings)


def _top_k(value: Any, name: str) -> int:
    if value in (-1, 0) and type(value) is int:
        return -1
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"{name} must be -1 (all tokens) or an integer of at least 1, got {_shown(value)}")
    return value


_PARAMETER_PARSERS = {
    "max_new_tokens": lambda value, name: None if value is None else _integer(value, name, 0, 2**31),
    "min_new_tokens": lambda value, name: _integer(value, name, 0, 2**31),
    "temperature": lambda value, name: _number(value, name, 0.0, 1e4),
    "top_p": lambda value, name: _number(value, name, 0.0, 1.0, low_open=True),
    "top_k": _top_k,
    "min_p": lambda value, name: _number(value, name, 0.0, 1.0),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "no_stop_trim": _boolean,
    "sampling_seed": lambda value, name: _integer(value, name, -(2**63), 2**64 - 1),
    "n": lambda value, name: _integer(value, name, 1, 4096),
}


@dataclass(frozen=True)
class GenerateInput:
    """One prompt of a request: ids or text, never both. Its n samples are `rid` (n = 1) or `rid-0`, `rid-1`, …"""

    input_ids: tuple[int, ...] | None
    text: str | None
    params: SamplingParams
    rid: str | None
    return_logprob: bool
    logprob_start_len: int = -1
    """The prompt token from which on log-probs of the prompt are wanted; -1: none."""
    input_logprob_temperature: float = 1.0
    """At which those are taken. Not SGLang's: there it is always 1."""
    return_routed_experts: bool = False
    """Whether the answer says which experts every token went to."""


@dataclass(frozen=True)
class GenerateRequest:
    """Body of /generate. `is_batch`: text or input_ids was a list of prompts (the answer is a list then)."""

    inputs: tuple[GenerateInput, ...]
    is_batch: bool
    stream: bool

    @classmethod
    def from_json(cls, body: Any) -> "GenerateRequest":
        body = _object(body, "the request")
        _refuse(body, UNSUPPORTED_FIELDS)
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise BadRequest("give either text or input_ids")
        prompts, is_batch = _prompts(text, ids)
        params, rids, logprobs = (body.get(name) for name in ("sampling_params", "rid", "return_logprob"))
        params_each = [SamplingParams.from_json(p) for p in _per_prompt(params, "sampling_params", prompts, is_batch)]
        rid_each = _rids(rids, len(prompts), is_batch)
        logprob_each = [
            False if flag is None else _boolean(flag, "return_logprob")
            for flag in _per_prompt(logprobs, "return_logprob", prompts, is_batch)
        ]
        starts = [
            -1 if start is None else _integer(start, "logprob_start_len", -1)
            for start in _per_prompt(body.get("logprob_start_len"), "logprob_start_len", prompts, is_batch)
        ]
        experts = [
            False if flag is None else _boolean(flag, "return_routed_experts")
            for flag in _per_prompt(body.get("return_routed_experts"), "return_routed_experts", prompts, is_batch)
        ]
        given = body.get("input_logprob_temperature")
        temperature = 1.0 if given is None else _number(given, "input_logprob_temperature", 0.0, 1e4, low_open=True)
        inputs = tuple(
            GenerateInput(
                None if ids is None else prompt, prompt if ids is None else None, *each, start, temperature, routed
            )
            for prompt, *each, start, routed in zip(
                prompts, params_each, rid_each, logprob_each, starts, experts, strict=True
            )
        )
        stream = body.get("stream")
        return cls(inputs, is_batch, False if stream is None else _boolean(stream, "stream"))


def _prompts(text: Any, ids: Any) -> tuple[list[Any], bool]:
    if ids is None:
        is_batch = isinstance(text, list)
        prompts = [_string(t, "text") for t in (text if is_batch else [text])]
    else:
        is_batch = isinstance(ids, list) and bool(ids) and all(isinstance(row, list) for row in ids)
        prompts = [_token_ids(row, "input_ids") for row in (ids if is_batch else [ids])]
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise BadRequest(f"{'text' if ids is None else 'input_ids'} must not be empty")
    return prompts, is_batch


def _per_prompt(value: Any, name: str, prompts: list[Any], is_batch: bool) -> list[Any]:
    if not isinstance(value, list):
        return [value] * len(prompts)
    if not is_batch or len(value) != len(prompts):
        raise BadRequest(f"{name} is a list of {len(value)}, but there are {len(prompts)} prompts")
    return value


def _rids(value: Any, count: int, is_batch: bool) -> list[str | None]:
    if value is None:
        return [None] * count
    if isinstance(value, list):
        if not is_batch or len(value) != count:
            raise BadRequest(f"rid is a list of {len(value)}, but there are {count} prompts")
        if len(set(map(str, value))) != count:
            raise BadRequest("the request ids in rid must differ from each other")
        return [_string(rid, "rid") for rid in value]
    rid = _string(value, "rid")
    return [f"{rid}_{i}" for i in range(count)] if is_batch else [rid]


@dataclass(frozen=True)
class AbortRequest:
    rid: str
    abort_all: bool

    @classmethod
    def from_json(cls, body: Any) -> "AbortRequest":
        body = _object(body, "the request")
        rid = "" if body.get("rid") is None else _string(body["rid"], "rid")
        abort_all = False if body.get("abort_all") is None else _boolean(body["abort_all"], "abort_all")
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
        mode = _object({} if body is None else body, "the request").get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {_shown(mode)}")
        return cls(mode)


@dataclass(frozen=True)
class TensorDescriptor:
    """Where in the shared memory one tensor lies: `offset` in bytes, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def from_json(cls, body: Any, size: int) -> "TensorDescriptor":
        body = _object(body, "each of tensors")
        name = _string(body.get("name"), "tensors: name")
        dtype = body.get("dtype")
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise BadRequest(f"{name}: dtype must be one of {', '.join(ITEM_SIZES)}, got {_shown(dtype)}")
        shape = tuple(_integer(n, f"{name}: shape", 1, 2**40) for n in _token_ids(body.get("shape"), f"{name}: shape"))
        offset = _integer(body.get("offset"), f"{name}: offset", 0)
        item = ITEM_SIZES[dtype]
        if not shape or offset % item or offset + math.prod(shape) * item > size:
            raise BadRequest(f"{name}: {dtype} {list(shape)} at byte {offset} does not lie aligned in {size} bytes")
        return cls(name, dtype, shape, offset)


@dataclass(frozen=True)
class WeightUpdateStart:
    weight_version: str

    @classmethod
    def from_json(cls, body: Any) -> "WeightUpdateStart":
        return cls(_string(_object(body, "the request").get("weight_version"), "weight_version"))


@dataclass(frozen=True)
class WeightUpdateBucket:
    """Some tensors in a shared memory file; `checksum` is the xxh3_128 of its first `size` bytes."""

    weight_version: str
    path: str
    size: int
    tensors: tuple[TensorDescriptor, ...] = field(repr=False)
    checksum: str = ""

    @classmethod
    def from_json(cls, body: Any) -> "WeightUpdateBucket":
        body = _object(body, "the request")
        memory = _object(body.get("shared_memory"), "shared_memory")
        size = _integer(memory.get("size"), "shared_memory: size", 1)
        tensors = body.get("tensors")
        if not isinstance(tensors, list) or not tensors:
            raise BadRequest("tensors must be a list that is not empty")
        return cls(
            weight_version=_string(body.get("weight_version"), "weight_version"),
            path=_string(memory.get("path"), "shared_memory: path"),
            size=size,
            tensors=tuple(TensorDescriptor.from_json(t, size) for t in tensors),
            checksum=_string(body.get("checksum"), "checksum"),
        )


@dataclass(frozen=True)
class WeightUpdateEnd:
    weight_version: str
    num_tensors: int

    @classmethod
    def from_json(cls, body: Any) -> "WeightUpdateEnd":
        body = _object(body, "the request")
        version = _string(body.get("weight_version"), "weight_version")
        return cls(version, _integer(body.get("num_tensors"), "num_tensors", 1))
