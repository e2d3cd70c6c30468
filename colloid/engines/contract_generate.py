"""The messages of /generate (SGLang's names), parsed and checked.

What an engine cannot do is refused, never ignored: fields of SGLang that ask for it are listed in `UNSUPPORTED_…` and
may only hold a neutral value; a name that SGLang does not have either is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from colloid.engines.contract_fields import (
    BadRequest,
    as_boolean,
    as_integer,
    as_number,
    as_object,
    as_string,
    as_token_ids,
    only_known,
    refuse,
    shown,
)

DEFAULT_MAX_NEW_TOKENS = 128
MOST_ALTERNATIVES = 1024
"""Log-probs that may be asked for beside a token's own, at each position."""
MOST_SAMPLES = 1 << 16
"""Samples of one request, over all of its prompts."""

_NONE, _OFF = (None,), (None, False)
# SGLang's fields that the embedded engine has no answer to, with the values that ask for nothing.
UNSUPPORTED_FIELDS: dict[str, tuple] = {
    **dict.fromkeys(("input_embeds", "positional_embed_overrides", "multi_item_delimiter_indices"), (None, [])),
    **dict.fromkeys(
        ("image_data", "video_data", "audio_data", "modalities", "mm_hashes", "mm_content_hashes"), (None, [])
    ),
    **dict.fromkeys(("video_config", "images_config", "mm_processor_kwargs", "max_dynamic_patch"), (None, {})),
    **dict.fromkeys(("min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch"), _NONE),
    **dict.fromkeys(("lora_path", "lora_id", "session_params", "custom_logit_processor", "watermark"), _NONE),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"), _NONE),
    **dict.fromkeys(("decode_tp_size", "disagg_prefill_dp_rank", "max_thinking_tokens", "priority"), _NONE),
    **dict.fromkeys(("extra_key", "cache_salt", "sampling_logprobs_mode", "token_indices_to_pool"), _NONE),
    **dict.fromkeys(("routed_dp_rank", "data_parallel_rank", "routed_experts_start_len"), (None, 0)),
    **dict.fromkeys(("use_audio_in_video", "return_sampling_mask", "return_hidden_states", "return_entropy"), _OFF),
    **dict.fromkeys(("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_bytes"), _OFF),
    **dict.fromkeys(("return_flat_raw_top_logprobs_b64", "return_indexer_topk", "background"), _OFF),
    **dict.fromkeys(("require_reasoning", "return_prompt_token_ids"), _OFF),
}
# Fields that change no answer, for those who keep books or choose the way to an engine.
IGNORED_FIELDS = frozenset(
    ("model", "log_metrics", "no_logs", "custom_labels", "routing_key", "conversation_id", "session_id")
    + ("external_trace_header", "received_time")
)
PROMPT_FIELDS = ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num")
KNOWN_FIELDS = (
    frozenset(UNSUPPORTED_FIELDS)
    | IGNORED_FIELDS
    | frozenset(PROMPT_FIELDS)
    | {"text", "input_ids", "stream", "token_ids_logprob", "return_text_in_logprobs", "return_routed_experts"}
    | {"input_logprob_temperature"}
)
UNSUPPORTED_PARAMETERS: dict[str, tuple] = {
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "watermark", "custom_params"), (None, "", {})),
    "stop_regex": (None, "", []),
    "beam_width": (None, 1),
    # A matter of slow tokenizers alone; a fast one adds none either way.
    "spaces_between_special_tokens": (None, True, False),
}


@dataclass(frozen=True)
class SamplingParams:
    """How one sample is drawn. temperature 0 is greedy; top_k -1 means all; max_new_tokens None: up to the context.

    Penalties count a sample's own output tokens, as SGLang's do. `logit_bias`: (token id, what is added), by id.
    """

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    n: int = 1
    stream_interval: int = 1
    """Tokens between two events of a stream."""

    @classmethod
    def from_json(cls, body: Any) -> SamplingParams:
        body = as_object({} if body is None else body, "sampling_params")
        own = frozenset(_PARAMETER_PARSERS)
        only_known(body, own | frozenset(UNSUPPORTED_PARAMETERS), "sampling_params")
        refuse(body, UNSUPPORTED_PARAMETERS)
        given: dict[str, Any] = {}
        for name, value in body.items():
            if name in own and (value is not None or name == "max_new_tokens"):
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
    def adjusts(self) -> bool:
        """Whether logits are changed before drawing, by what came before or by a bias."""
        penalties = self.frequency_penalty, self.presence_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0) or bool(self.logit_bias)


def _stop(value: Any, name: str) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise BadRequest(f"{name} must be a non-empty string or a list of them, got {shown(value)}")
    return tuple(strings)


def _top_k(value: Any, name: str) -> int:
    if value in (-1, 0) and type(value) is int:
        return -1
    if type(value) is not int or value < 1:
        raise BadRequest(f"{name} must be -1 (all tokens) or an integer of at least 1, got {shown(value)}")
    return value


def _logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    pairs = {}
    for token, bias in as_object(value, name).items():
        if not (token.isascii() and token.isdecimal()) or len(token) > 10:
            raise BadRequest(f"the keys of {name} must be token ids, got {shown(token)}")
        pairs[int(token)] = as_number(bias, f"{name}[{token}]", -1e9, 1e9)
    return tuple(sorted(pairs.items()))


_PARAMETER_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "max_new_tokens": lambda value, name: None if value is None else as_integer(value, name, 0, 2**31),
    "min_new_tokens": lambda value, name: as_integer(value, name, 0, 2**31),
    "temperature": lambda value, name: as_number(value, name, 0.0, 1e4),
    "top_p": lambda value, name: as_number(value, name, 0.0, 1.0, low_open=True),
    "top_k": _top_k,
    "min_p": lambda value, name: as_number(value, name, 0.0, 1.0),
    "frequency_penalty": lambda value, name: as_number(value, name, -2.0, 2.0),
    "presence_penalty": lambda value, name: as_number(value, name, -2.0, 2.0),
    "repetition_penalty": lambda value, name: as_number(value, name, 0.0, 2.0, low_open=True),
    "logit_bias": _logit_bias,
    "stop": _stop,
    "stop_token_ids": as_token_ids,
    "ignore_eos": as_boolean,
    "skip_special_tokens": as_boolean,
    "no_stop_trim": as_boolean,
    "sampling_seed": lambda value, name: as_integer(value, name, -(2**63), 2**64 - 1),
    "n": lambda value, name: as_integer(value, name, 1, 4096),
    "stream_interval": lambda value, name: as_integer(value, name, 1, 2**31),
}
assert set(_PARAMETER_PARSERS) == {field.name for field in fields(SamplingParams)}


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
    top_logprobs_num: int = 0
    """Of how many most probable tokens log-probs are wanted, at each position."""
    token_ids_logprob: tuple[int, ...] = ()
    """Tokens whose log-probs are wanted, at each position."""
    return_routed_experts: bool = False
    """Whether the answer says which experts every token went to."""
    input_logprob_temperature: float = 1.0
    """At which log-probs of the prompt are taken. Not SGLang's: there it is always 1."""


@dataclass(frozen=True)
class GenerateRequest:
    """Body of /generate. `is_batch`: text or input_ids was a list of prompts (the answer is a list then)."""

    inputs: tuple[GenerateInput, ...]
    is_batch: bool
    stream: bool
    return_text_in_logprobs: bool = False

    @classmethod
    def from_json(cls, body: Any) -> GenerateRequest:
        body = as_object(body, "the request")
        only_known(body, KNOWN_FIELDS, "the request")
        refuse(body, UNSUPPORTED_FIELDS)
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise BadRequest("give either text or input_ids")
        prompts, is_batch = _prompts(text, ids)

        def each(name: str, default: Any, parse: Callable[[Any, str], Any]) -> list[Any]:
            values = _per_prompt(body.get(name), name, len(prompts), is_batch)
            return [default if value is None else parse(value, name) for value in values]

        given = body.get("input_logprob_temperature")
        temperature = 1.0 if given is None else as_number(given, "input_logprob_temperature", 0.0, 1e4, low_open=True)
        columns = (
            each("sampling_params", SamplingParams(), lambda value, _: SamplingParams.from_json(value)),
            _rids(body.get("rid"), len(prompts), is_batch),
            each("return_logprob", False, as_boolean),
            each("logprob_start_len", -1, lambda value, name: as_integer(value, name, -1)),
            each("top_logprobs_num", 0, lambda value, name: as_integer(value, name, 0, MOST_ALTERNATIVES)),
            _wanted_ids(body.get("token_ids_logprob"), len(prompts), is_batch),
            each("return_routed_experts", False, as_boolean),
        )
        inputs = tuple(
            GenerateInput(None if ids is None else prompt, prompt if ids is None else None, *rest, temperature)
            for prompt, *rest in zip(prompts, *columns, strict=True)
        )
        num_samples = sum(each_input.params.n for each_input in inputs)
        if num_samples > MOST_SAMPLES:
            raise BadRequest(f"the request asks for {num_samples} samples; at most {MOST_SAMPLES} are answered at once")
        return cls(inputs, is_batch, _flag(body, "stream"), _flag(body, "return_text_in_logprobs"))


def _flag(body: dict[str, Any], name: str) -> bool:
    return False if body.get(name) is None else as_boolean(body[name], name)


def _prompts(text: Any, ids: Any) -> tuple[list[Any], bool]:
    if ids is None:
        is_batch = isinstance(text, list)
        prompts = [as_string(t, "text") for t in (text if is_batch else [text])]
    else:
        is_batch = isinstance(ids, list) and bool(ids) and all(isinstance(row, list) for row in ids)
        prompts = [as_token_ids(row, "input_ids") for row in (ids if is_batch else [ids])]
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise BadRequest(f"{'text' if ids is None else 'input_ids'} must not be empty")
    return prompts, is_batch


def _per_prompt(value: Any, name: str, count: int, is_batch: bool) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if not is_batch or len(value) != count:
        raise BadRequest(f"{name} is a list of {len(value)}, but there are {count} prompts")
    return value


def _wanted_ids(value: Any, count: int, is_batch: bool) -> list[tuple[int, ...]]:
    """A list of ids for all prompts, or a list of such lists, one a prompt."""
    nested = isinstance(value, list) and any(not isinstance(row, int) for row in value)
    rows = _per_prompt(value, "token_ids_logprob", count, is_batch) if nested else [value] * count
    wanted = [() if row is None else as_token_ids(row, "token_ids_logprob") for row in rows]
    longest = max(map(len, wanted))
    if longest > MOST_ALTERNATIVES:
        raise BadRequest(f"token_ids_logprob has {longest} ids; at most {MOST_ALTERNATIVES} are answered")
    return wanted


def _rids(value: Any, count: int, is_batch: bool) -> list[str | None]:
    if value is None:
        return [None] * count
    if isinstance(value, list):
        rids = [as_string(rid, "rid") for rid in _per_prompt(value, "rid", count, is_batch)]
        if len(set(rids)) != count:
            raise BadRequest("the request ids in rid must differ from each other")
        return rids
    rid = as_string(value, "rid")
    return [f"{rid}_{i}" for i in range(count)] if is_batch else [rid]
