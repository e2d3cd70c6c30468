"""The messages of /v1/chat/completions and /v1/completions, parsed and checked: OpenAI's names and SGLang's besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colloid.engines.contract_fields import (
    BadRequest,
    as_boolean,
    as_integer,
    as_object,
    as_string,
    as_token_ids,
    only_known,
    refuse,
    shown,
)
from colloid.engines.contract_generate import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
MOST_TOP_LOGPROBS = 20

# Names of what SamplingParams takes.
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "seed": "sampling_seed"}
RENAMED |= {"min_tokens": "min_new_tokens"}
SAME = ("temperature", "top_p", "top_k", "min_p", "stop", "n", "stop_token_ids", "ignore_eos", "skip_special_tokens")
SAME += ("no_stop_trim", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")

_OFF = (None, False)
UNSUPPORTED: dict[str, tuple] = {
    **dict.fromkeys(("tools", "functions", "modalities"), (None, [])),
    **dict.fromkeys(("function_call", "audio", "prediction", "web_search_options", "reasoning_effort"), (None,)),
    **dict.fromkeys(("regex", "ebnf", "json_schema", "lora_path", "session_params"), (None, "")),
    **dict.fromkeys(("custom_params", "custom_logit_processor", "priority", "extra_key", "cache_salt"), (None,)),
    **dict.fromkeys(("stop_regex", "suffix"), (None, "", [])),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts"), _OFF),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "best_of": (None, 1),
}
# Fields that change no answer here.
IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
    + ("separate_reasoning", "stream_reasoning", "continue_final_message", "session_id", "log_metrics", "custom_labels")
)
COMMON = frozenset(UNSUPPORTED) | IGNORED | frozenset(RENAMED) | frozenset(SAME)
COMMON |= {"model", "stream", "stream_options", "logprobs", "rid"}
STREAM_OPTIONS = frozenset(("include_usage", "continuous_usage_stats", "include_obfuscation"))


@dataclass(frozen=True)
class OpenAIRequest:
    """What both kinds have. `num_top`: alternatives of each token, where `logprobs` are wanted."""

    params: SamplingParams
    model: str | None
    rid: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    num_top: int

    @classmethod
    def common(cls, body: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
        """The fields above but the log-probs'. `max_tokens`: where the request says nothing."""
        refuse(body, UNSUPPORTED)
        given: dict[str, Any] = {"max_new_tokens": max_tokens}
        given |= {name: body[name] for name in SAME if body.get(name) is not None}
        given |= {ours: body[name] for name, ours in RENAMED.items() if body.get(name) is not None}
        options = as_object(body.get("stream_options") or {}, "stream_options")
        only_known(options, STREAM_OPTIONS, "stream_options")
        return {
            "params": SamplingParams.from_json(given),
            "model": None if body.get("model") is None else as_string(body["model"], "model"),
            "rid": None if body.get("rid") is None else as_string(body["rid"], "rid"),
            "stream": _flag(body, "stream"),
            "include_usage": _flag(options, "include_usage"),
            "continuous_usage": _flag(options, "continuous_usage_stats"),
        }


@dataclass(frozen=True)
class ChatRequest(OpenAIRequest):
    """`messages`: roles and texts, as chat templates take them. `variables`: further ones of the template."""

    messages: tuple[dict[str, Any], ...] = ()
    variables: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, body: Any) -> ChatRequest:
        body = as_object(body, "the request")
        only_known(body, COMMON | {"messages", "top_logprobs", "chat_template_kwargs"}, "the request")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadRequest("messages must be a list of objects that is not empty")
        num_top = body.get("top_logprobs")
        logprobs = _flag(body, "logprobs")
        if num_top and not logprobs:
            raise BadRequest("top_logprobs is given, but logprobs is not true")
        variables = body.get("chat_template_kwargs")
        return cls(
            **cls.common(body, None),
            logprobs=logprobs,
            num_top=0 if num_top is None else as_integer(num_top, "top_logprobs", 0, MOST_TOP_LOGPROBS),
            messages=tuple(_message(message) for message in messages),
            variables=None if variables is None else as_object(variables, "chat_template_kwargs"),
        )


@dataclass(frozen=True)
class CompletionRequest(OpenAIRequest):
    """`prompts`: texts or token ids. `echo`: the prompt's text comes before the output's, with its log-probs."""

    prompts: tuple[str | tuple[int, ...], ...] = ()
    echo: bool = False

    @classmethod
    def from_json(cls, body: Any) -> CompletionRequest:
        body = as_object(body, "the request")
        only_known(body, COMMON | {"prompt", "echo"}, "the request")
        wanted = body.get("logprobs")
        num_top = 0 if wanted is None or wanted is False else 1 if wanted is True else wanted
        return cls(
            **cls.common(body, DEFAULT_COMPLETION_TOKENS),
            logprobs=wanted is not None and wanted is not False,
            num_top=as_integer(num_top, "logprobs", 0, MOST_TOP_LOGPROBS),
            prompts=_prompts(body.get("prompt")),
            echo=_flag(body, "echo"),
        )


def _flag(body: dict[str, Any], name: str) -> bool:
    return False if body.get(name) is None else as_boolean(body[name], name)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """With its content as one text; parts are joined as SGLang joins them."""
    as_string(message.get("role"), "messages: role")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message | {"content": content or ""}
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequest(f"messages: content must be a string or a list of parts, got {shown(content)}")
    other = next((part.get("type") for part in content if part.get("type") != "text"), None)
    if other is not None:
        raise BadRequest(f"messages: parts of the type {shown(other)} are not supported by the embedded engine")
    return message | {"content": " ".join(as_string(part.get("text"), "messages: text") for part in content)}


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    rows = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if not all(isinstance(row, (str, list)) and row for row in rows):
        raise BadRequest("prompt must be a string that is not empty, a list of token ids, or a list of these")
    return tuple(row if isinstance(row, str) else as_token_ids(row, "prompt") for row in rows)
