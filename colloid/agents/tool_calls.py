"""Calls of tools in a model's text. What is no call as its format says is handed back as text; nothing raises.

| format | families | a call |
|---|---|---|
| `hermes` | Qwen2.5, Qwen3, ChatML models | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |
| `qwen_xml` | Qwen3-Coder | `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>` |
| `glm45` | GLM-4.5 to 4.7 | `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>` |
| `glm4` | GLM-4 | a name, and on the next line a JSON object, which is all there is |
| `deepseek` | DeepSeek-V3, R1, V3.1 | between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>` |
| `kimi` | Kimi K2, Moonlight | between `<|tool_call_begin|>` and `<|tool_call_end|>` |
| `llama3` | Llama 3.1 to 3.3 | `{"name": …, "parameters": {…}}`, which is all there is; `<function=f>{…}</function>` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """One call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """What looked like a call and is none."""

    text: str
    reason: str


@dataclass(frozen=True)
class ParsedText:
    """A message: what is said, and the calls in it, in order."""

    content: str
    """The text without the calls; with the thoughts in front of it, and with what is malformed."""
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[Malformed] = field(default_factory=list)


class _NoCall(ValueError):
    """A block is no call; why."""


Block = re.Match[str]
Parse = Callable[[Block, dict[str, dict]], ToolCall]


@dataclass(frozen=True)
class _Format:
    """How a format writes calls.

    Attributes:
        marker: what shows, in a text, that it is this format.
        blocks: a pattern of one call, closed or cut off at the end of the text; group 1 is what is in it.
        parse: from a block; the second argument gives the types of the arguments, by function.
        around: what surrounds the calls, and is not said either.
    """

    marker: re.Pattern[str]
    blocks: re.Pattern[str]
    parse: Parse
    around: re.Pattern[str] | None = None


def parse_tool_calls(text: str, format: str | None = None, tools: list | None = None) -> ParsedText:
    """The calls in a model's text.

    Args:
        format: a key of `FORMATS`; None: the one whose marks are in the text.
        tools: their schemas, so that XML formats know which arguments are texts.

    Raises:
        KeyError: there is no such format.
    """
    thoughts, said = _after_thoughts(text)
    name = format or detect_format(said)
    if name is None:
        return ParsedText(text.strip())
    entry, types = FORMATS[name], _argument_types(tools)
    calls: list[ToolCall] = []
    malformed: list[Malformed] = []
    between: list[str] = []
    end = 0

    def say(part: str) -> None:
        between.append(entry.around.sub("", part) if entry.around is not None else part)

    for block in entry.blocks.finditer(said):
        say(said[end : block.start()])
        end = block.end()
        try:
            calls.append(entry.parse(block, types))
        except (_NoCall, RecursionError) as error:
            malformed.append(Malformed(block.group(0), str(error)))
            between.append(block.group(0))
    say(said[end:])
    content = "".join(between) if calls else said
    return ParsedText((thoughts + content).strip(), calls, malformed)


def detect_format(text: str) -> str | None:
    """The format whose marks a text has; None: no calls."""
    return next((name for name, entry in FORMATS.items() if name != "glm4" and entry.marker.search(text)), None)


def template_format(chat_template: str | None) -> str | None:
    """The format that a chat template shows calls in; None: none that is known."""
    template = chat_template or ""
    marks = (
        ("<arg_key>", "glm45"),
        ("<function=", "qwen_xml"),
        ("<tool_call>", "hermes"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<|im_middle|>", "kimi"),
        ("<|eot_id|>", "llama3"),
        ("<|observation|>", "glm4"),
    )
    return next((name for mark, name in marks if mark in template), None)


def call_opening(format: str | None, name: str | None = None) -> str:
    """How a message begins that calls this tool; None: any tool. Of an unknown format: as `hermes`."""
    named, unnamed = _OPENINGS[format or "hermes"]
    return unnamed if name is None else named.replace("NAME", name)


def _after_thoughts(text: str) -> tuple[str, str]:
    """What is thought and what is said. A call that is only thought of is none."""
    thoughts, closing, said = text.rpartition("</think>")
    if closing:
        return thoughts + closing, said
    if text.lstrip().startswith("<think>"):
        return text, ""
    return "", text


def _json(text: str) -> Any:
    try:
        return json.loads(text.strip(), strict=False)
    except ValueError as error:
        raise _NoCall(f"not JSON: {error}") from error


def _call(name: Any, arguments: Any) -> ToolCall:
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name.strip():
        raise _NoCall("no name of a function")
    if not isinstance(arguments, dict):
        raise _NoCall(f"the arguments are not an object, but {type(arguments).__name__}")
    return ToolCall(name.strip(), arguments)


def _json_call(block: Block, types: dict[str, dict]) -> ToolCall:
    value = _json(block.group(1))
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise _NoCall("not an object")
    return _call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _named_call(block: Block, types: dict[str, dict]) -> ToolCall:
    return _call(block.group("name"), block.group("arguments"))


def _qwen_xml_call(block: Block, types: dict[str, dict]) -> ToolCall:
    found = re.match(r"\s*<function=([^>\n]+)>(.*)", block.group(1), re.DOTALL)
    if found is None:
        raise _NoCall("no <function=…>")
    name = found.group(1).strip()
    pairs = re.findall(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", found.group(2), re.DOTALL)
    values = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in pairs}
    return _call(name, {key: _value(value, types.get(name, {}).get(key)) for key, value in values.items()})


def _glm45_call(block: Block, types: dict[str, dict]) -> ToolCall:
    name, _, rest = block.group(1).partition("<arg_key>")
    name, rest = name.strip(), "<arg_key>" + rest if rest else ""
    if not re.fullmatch(r"[\w.-]+", name):
        raise _NoCall("no name of a function")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", rest, re.DOTALL)
    if len(pairs) != rest.count("<arg_key>"):
        raise _NoCall("a key without a value")
    return _call(name, {key.strip(): _value(value, types.get(name, {}).get(key.strip())) for key, value in pairs})


def _value(text: str, kind: Any) -> Any:
    """An argument that is written as it is if it is a text, and else as JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _argument_types(tools: list | None) -> dict[str, dict]:
    """The JSON type of each argument of each function, where the schemas say it."""
    types: dict[str, dict] = {}
    for tool in tools or []:
        function = (tool.get("function") or tool) if isinstance(tool, dict) else {}
        properties = (function.get("parameters") or {}).get("properties") or {}
        types[function.get("name")] = {key: (value or {}).get("type") for key, value in properties.items()}
    return types


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


_TOOL_CALL = _pattern(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)")
_OBJECT = r"\{.*?\}(?=\s*(?:;|\Z))"

FORMATS: dict[str, _Format] = {
    "qwen_xml": _Format(_pattern(r"<tool_call>\s*<function="), _TOOL_CALL, _qwen_xml_call),
    "glm45": _Format(_pattern(r"<tool_call>\s*[\w.-]+\s*(?:<arg_key>|</tool_call>)"), _TOOL_CALL, _glm45_call),
    "hermes": _Format(_pattern("<tool_call>"), _TOOL_CALL, _json_call),
    "deepseek": _Format(
        _pattern("<｜tool▁call▁begin｜>"),
        _pattern(
            r"<｜tool▁call▁begin｜>(?:function(?=<｜tool▁sep｜>[^\n{]*\n```)<｜tool▁sep｜>)?(?P<name>[^\n<]*)"
            r"(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?P<arguments>.*?)\s*(?:```)?\s*"
            r"(?:<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|\Z)"
        ),
        _named_call,
        _pattern(r"<｜tool▁calls▁(?:begin|end)｜>|<｜tool▁call▁end｜>"),
    ),
    "kimi": _Format(
        _pattern(r"<\|tool_call_begin\|>"),
        _pattern(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s<:{]*)(?::\d+)?\s*(?:<\|tool_call_argument_begin\|>)?"
            r"(?P<arguments>.*?)(?:<\|tool_call_end\|>|(?=<\|tool_call_begin\|>)|\Z)"
        ),
        _named_call,
        _pattern(r"<\|tool_calls_section_(?:begin|end)\|>|<\|tool_call_end\|>"),
    ),
    "llama3": _Format(
        _pattern(r"<function=[^>]+>|<\|python_tag\|>\s*\{|\A\s*\{\s*\"(?:name|type|function)\""),
        _pattern(
            rf"<function=(?P<name>[^>]+)>(?P<arguments>.*?)(?:</function>|\Z)|(?:<\|python_tag\|>|\A|;)\s*({_OBJECT})"
        ),
        lambda block, types: _named_call(block, types) if block.group("name") else _object_call(block),
        _pattern(r"<\|python_tag\|>|<\|eom_id\|>"),
    ),
    "glm4": _Format(
        _pattern(r"\A\s*[\w.-]+\n\s*\{"),
        _pattern(r"\A\s*(?P<name>[\w.-]+)\n\s*(?P<arguments>\{.*\})\s*\Z"),
        _named_call,
    ),
}
"""Format -> how it is read. The order is that in which a text is compared with their marks."""


_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
_KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions."
_OPENINGS = {
    "qwen_xml": ("<tool_call>\n<function=NAME>\n", "<tool_call>\n<function="),
    "glm45": ("<tool_call>NAME\n", "<tool_call>"),
    "hermes": ('<tool_call>\n{"name": "NAME", "arguments": ', '<tool_call>\n{"name": "'),
    "deepseek": (f"{_DEEPSEEK}NAME\n```json\n", _DEEPSEEK),
    "kimi": (f"{_KIMI}NAME:0<|tool_call_argument_begin|>", _KIMI),
    "llama3": ('{"name": "NAME", "parameters": ', '{"name": "'),
    "glm4": ("NAME\n", ""),
}
"""Format -> how a call begins: of the tool NAME, and of any."""


def _object_call(block: Block) -> ToolCall:
    value = _json(block.group(3))
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not ("parameters" in value or "arguments" in value):
        raise _NoCall("an object without parameters")
    return _call(value.get("name"), value.get("parameters", value.get("arguments")))


def as_messages(text: str, format: str | None = None, tools: list | None = None) -> Iterator[dict[str, Any]]:
    """The forms, beside its text, in which clients send back a message that has calls of tools."""
    parsed = parse_tool_calls(text, format, tools)
    if not parsed.calls:
        return
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in parsed.calls
    ]
    for content in {parsed.content, _after_thoughts(parsed.content)[1].strip(), text, ""}:
        yield {"role": "assistant", "content": content, "tool_calls": calls}
