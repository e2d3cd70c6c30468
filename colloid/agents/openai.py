"""OpenAI's chat completions: a request's body as a `ChatRequest`, an `Answer` as a body or as a stream of chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from colloid.agents.chat import (
    Answer,
    Call,
    ChatRequest,
    RequestError,
    messages_of,
    pieces,
    positive,
    read,
    sampling_of,
    stops_of,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "top_logprobs": 0, "functions": []}
"""What cannot be asked for, with the value that asks for nothing."""


def read_request(body: dict[str, Any]) -> ChatRequest:
    """
    Raises:
        RequestError: the body is none of a chat completion, or asks for what is not there.
    """
    n = read(body, "n", int, 1)
    if n != 1:
        raise RequestError(f"'n' is {n}: one answer a request is supported", code="unsupported_value", param="n")
    for name, neutral in _NEUTRAL.items():
        if body.get(name) is not None and body[name] != neutral:
            raise RequestError(f"{name!r} is not supported", code="unsupported_parameter", param=name)
    shape = (read(body, "response_format", dict) or {}).get("type", "text")
    if shape != "text":
        raise RequestError(
            f"'response_format' of type {shape!r} is not supported: answers are the model's own text",
            code="unsupported_value",
            param="response_format",
        )
    tools = _tools(body)
    parse, forced, name = _tool_choice(body, tools)
    return ChatRequest(
        messages=[_message(message, number) for number, message in enumerate(messages_of(body))],
        tools=tools,
        parse_calls=parse,
        forced=forced,
        forced_name=name,
        parallel_calls=read(body, "parallel_tool_calls", bool, True),
        stop=stops_of(body, "stop"),
        max_tokens=positive(body, "max_completion_tokens") or positive(body, "max_tokens"),
        sampling=sampling_of(body),
        model=read(body, "model", str, ""),
        stream=read(body, "stream", bool, False),
        include_usage=bool((read(body, "stream_options", dict) or {}).get("include_usage")),
        log_probs=read(body, "logprobs", bool, False),
    )


def completion(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """The body of an answer that is sent at once."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content or (None if answer.calls else ""),
        "refusal": None,
    }
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _log_probs(answer) if request.log_probs else None,
        "finish_reason": _finish_reason(answer),
    }
    return {**_head(answer, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def stream(answer: Answer, request: ChatRequest) -> Iterator[bytes]:
    """The events of an answer that is streamed."""
    head = _head(answer, request, "chat.completion.chunk")
    usage = {"usage": None} if request.include_usage else {}

    def chunk(delta: dict[str, Any], finish: str | None = None, log_probs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
        return _event({**head, "choices": [choice], **usage})

    yield chunk({"role": "assistant", "content": ""}, log_probs=_log_probs(answer) if request.log_probs else None)
    for piece in pieces(answer.content):
        yield chunk({"content": piece})
    for index, call in enumerate(answer.calls):
        opened = _call(call)
        arguments, opened["function"]["arguments"] = opened["function"]["arguments"], ""
        yield chunk({"tool_calls": [{"index": index, **opened}]})
        for piece in pieces(arguments):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, _finish_reason(answer))
    if request.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _head(answer: Answer, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": request.model}


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "length" if answer.truncated else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _call(call: Call) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _log_probs(answer: Answer) -> dict[str, Any]:
    content = [
        {
            "token": token.text,
            "logprob": token.log_prob,
            "bytes": list(token.text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for token in answer.tokens
    ]
    return {"content": content, "refusal": None}


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = read(body, "tools", list) or None
    for number, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'tools[{number}] must be {{"type": "function", "function": {{"name": …}}}}, not {tool!r:.120}',
                param=f"tools[{number}]",
            )
    return tools


def _tool_choice(body: dict[str, Any], tools: list[dict[str, Any]] | None) -> tuple[bool, bool, str | None]:
    """Whether calls are looked for, whether one must come, and of which tool."""
    choice = read(body, "tool_choice", (str, dict), "auto")
    if choice in ("auto", "none"):
        return choice == "auto", False, None
    name = None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise RequestError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": …}}, not '
            f"{choice!r:.120}",
            param="tool_choice",
        )
    names = [tool["function"]["name"] for tool in tools or []]
    if not names or (name is not None and name not in names):
        raise RequestError(f"tool_choice asks for {name or 'a tool'}, and the tools are {names}", param="tool_choice")
    return True, True, name if name is not None or len(names) > 1 else names[0]


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """What chat templates read of a message."""
    where = f"messages[{number}]"
    role = _ROLES.get(message.get("role"))
    if role is None:
        raise RequestError(
            f"{where}: the role must be one of {', '.join(_ROLES)}, not {message.get('role')!r:.80}",
            param=f"{where}.role",
        )
    calls = message.get("tool_calls") or []
    if message.get("content") is None and not (role == "assistant" and calls):
        raise RequestError(f"{where}: a message of the role {role} needs a content", param=f"{where}.content")
    made: dict[str, Any] = {"role": role, "content": _text(message.get("content"), where)}
    if role == "assistant" and calls:
        made["tool_calls"] = [_read_call(call, where) for call in calls]
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise RequestError(f"{where}: a message of the role tool needs a tool_call_id", param=where)
        made["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else [None]
    if not all(isinstance(text, str) for text in texts) or len(texts) != len(content):
        raise RequestError(
            f"{where}: the content must be a text, or a list of parts of type text; others are not supported",
            param=f"{where}.content",
        )
    return "".join(texts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: a call of a tool needs a function with a name, not {call!r:.120}", param=where)
    arguments = function.get("arguments") or "{}"
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**made, "id": call["id"]} if isinstance(call.get("id"), str) else made
