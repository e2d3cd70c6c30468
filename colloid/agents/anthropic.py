"""Anthropic's messages: a request's body as a `ChatRequest`, an `Answer` as a body or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from colloid.agents.chat import (
    Answer,
    Call,
    ChatRequest,
    ContextFull,
    RequestError,
    messages_of,
    pieces,
    positive,
    read,
    sampling_of,
    stops_of,
)


def read_request(body: dict[str, Any]) -> ChatRequest:
    """
    Raises:
        RequestError: the body is none of a message, or asks for what is not there.
    """
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    for number, message in enumerate(messages_of(body)):
        messages += _messages(message, f"messages[{number}]")
    tools = [_tool(tool, number) for number, tool in enumerate(read(body, "tools", list) or [])] or None
    choice = read(body, "tool_choice", dict) or {"type": "auto"}
    kind, name = choice.get("type"), choice.get("name")
    names = [tool["function"]["name"] for tool in tools or []]
    if kind not in ("auto", "any", "tool", "none"):
        raise RequestError(f"tool_choice must be of type auto, any, tool or none, not {choice!r:.120}")
    if (kind in ("any", "tool") and not names) or (kind == "tool" and name not in names):
        raise RequestError(f"tool_choice asks for {name or 'a tool'}, and the tools are {names}")
    max_tokens = positive(body, "max_tokens")
    if max_tokens is None:
        raise RequestError("max_tokens: Field required")
    return ChatRequest(
        messages=messages,
        tools=tools,
        parse_calls=kind != "none",
        forced=kind in ("any", "tool"),
        forced_name=name if kind == "tool" else names[0] if kind == "any" and len(names) == 1 else None,
        parallel_calls=not choice.get("disable_parallel_tool_use"),
        stop=stops_of(body, "stop_sequences"),
        max_tokens=max_tokens,
        sampling=sampling_of(body),
        model=read(body, "model", str, ""),
        stream=read(body, "stream", bool, False),
    )


def completion(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """The body of an answer that is sent at once."""
    content = [{"type": "text", "text": answer.content}] if answer.content else []
    content += [_block(call, call.arguments) for call in answer.calls]
    return {**_head(answer, request), "content": content, **_ending(answer), "usage": _usage(answer)}


def stream(answer: Answer, request: ChatRequest) -> Iterator[bytes]:
    """The events of an answer that is streamed."""
    start = {**_head(answer, request), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**start, "usage": {**_usage(answer), "output_tokens": 0}})
    index = 0
    if answer.content:
        yield _event("content_block_start", index=index, content_block={"type": "text", "text": ""})
        for piece in pieces(answer.content):
            yield _event("content_block_delta", index=index, delta={"type": "text_delta", "text": piece})
        yield _event("content_block_stop", index=index)
        index += 1
    for call in answer.calls:
        yield _event("content_block_start", index=index, content_block=_block(call, {}))
        for piece in pieces(json.dumps(call.arguments, ensure_ascii=False)):
            delta = {"type": "input_json_delta", "partial_json": piece}
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
        index += 1
    yield _event("message_delta", delta=_ending(answer), usage={"output_tokens": answer.completion_tokens})
    yield _event("message_stop")


def error_body(error: RequestError) -> dict[str, Any]:
    message = error.message
    if isinstance(error, ContextFull):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": error.kind, "message": message}}


def _event(kind: str, **data: Any) -> bytes:
    text = json.dumps({"type": kind, **data}, ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()


def _head(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": request.model}


def _ending(answer: Answer) -> dict[str, Any]:
    if answer.calls:
        reason = "tool_use"
    elif answer.truncated:
        reason = "max_tokens"
    else:
        reason = "end_turn" if answer.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}


def _block(call: Call, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _tool(tool: Any, number: int) -> dict[str, Any]:
    """A tool in OpenAI's form, which chat templates read."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise RequestError(f"tools[{number}] needs a name and an input_schema: {tool!r:.120}")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A message in OpenAI's form: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}: the role must be user or assistant, not {role!r:.80}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}: the content must be a text or a list of blocks")
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type")
        if kind == "text":
            texts.append(_text([block], where))
        elif kind == "tool_result" and role == "user":
            answer = _text(block.get("content") or "", where)
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": answer})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
            calls.append({"type": "function", "id": str(block.get("id")), "function": function})
        elif kind not in ("thinking", "redacted_thinking"):  # Thoughts of an answer are in its text.
            raise RequestError(f"{where}: blocks of type {kind!r} are not supported in a message of {role}")
    if role == "assistant":
        return [{"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}]
    return results + ([{"role": role, "content": "".join(texts)}] if texts or not results else [])


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in blocks):
        raise RequestError(f"{where}: only texts are supported, not {content!r:.120}")
    return "".join(block["text"] for block in blocks)
