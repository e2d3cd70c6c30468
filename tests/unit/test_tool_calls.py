"""Calls of tools in a model's text, in the formats of the supported families."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.agents.tool_calls import (
    FORMATS,
    ToolCall,
    as_messages,
    call_opening,
    parse_tool_calls,
    template_format,
)

SEARCH = ToolCall("search", {"query": "rain in Rome", "limit": 3})
CLOCK = ToolCall("clock", {})
QUERY = json.dumps(SEARCH.arguments)
TEXTS = {
    "hermes": f'I look.\n<tool_call>\n{{"name": "search", "arguments": {QUERY}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "qwen_xml": "I look.\n<tool_call>\n<function=search>\n<parameter=query>\nrain in Rome\n</parameter>\n"
    "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "glm45": "I look.\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>rain in Rome</arg_value>\n"
    "<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
    "deepseek": "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
    f"{QUERY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
    f"{QUERY}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "llama3": f'<|python_tag|>{{"name": "search", "parameters": {QUERY}}}; {{"name": "clock", "parameters": {{}}}}',
}


@pytest.mark.parametrize("name", list(TEXTS))
def test_two_calls_of_each_format_are_found_by_their_marks_and_by_name(name):
    for given_name in (None, name):
        parsed = parse_tool_calls(TEXTS[name], given_name)
        assert parsed.calls == [SEARCH, CLOCK] and not parsed.malformed
        assert parsed.content == ("" if name == "llama3" else "I look.")


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{QUERY}<｜tool▁call▁end｜>", SEARCH),
        (f'{{"name": "search", "parameters": {QUERY}}}', SEARCH),
        (f'{{"type": "function", "function": {{"name": "search", "parameters": {QUERY}}}}}', SEARCH),
        (f"<function=search>{QUERY}</function>", SEARCH),
        (f'<tool_call>{{"name": "search", "arguments": {json.dumps(QUERY)}}}</tool_call>', SEARCH),
        (f'<tool_call>{{"name": "search", "arguments": {QUERY}}}', SEARCH),
        ('<think>\nor <tool_call>{"name": "x"}</tool_call>?</think><tool_call>{"name": "clock"}</tool_call>', CLOCK),
        ('<tool_call>{"name": "say", "arguments": {"text": "a\nb"}}</tool_call>', ToolCall("say", {"text": "a\nb"})),
    ],
)
def test_the_ways_in_which_models_write_the_same_call(text, call):
    parsed = parse_tool_calls(text)
    assert parsed.calls == [call] and not parsed.malformed


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("hermes", f"{QUERY}}}\n</tool_call>"),
        (None, f"{QUERY}}}\n</tool_call>"),
        ("qwen_xml", "<parameter=query>\nrain in Rome\n</parameter>\n<parameter=limit>\n3\n</parameter>\n</function>"),
        ("glm45", "<arg_key>query</arg_key><arg_value>rain in Rome</arg_value><arg_key>limit</arg_key><arg_value>3"),
        ("deepseek", f"{QUERY}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("kimi", f"{QUERY}<|tool_call_end|><|tool_calls_section_end|>"),
        ("llama3", f"{QUERY}}}"),
        ("glm4", QUERY),
    ],
)
def test_a_message_that_is_made_to_begin_with_a_call_is_one(name, rest):
    rest += "</arg_value></tool_call>" if name == "glm45" else ""
    opening = call_opening(name, "search")
    assert parse_tool_calls(opening + rest, name).calls == [SEARCH]
    assert opening.startswith(call_opening(name)), "any tool: up to its name"


def test_glm4_is_read_where_it_is_asked_for():
    parsed = parse_tool_calls(f"search\n{QUERY}", "glm4")
    assert parsed.calls == [SEARCH] and parsed.content == ""
    assert parse_tool_calls(f"search\n{QUERY}").calls == []


def test_schemas_say_which_arguments_are_texts():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    glm = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    qwen = "<tool_call><function=f><parameter=a>3</parameter></function></tool_call>"
    for text in (glm, qwen):
        assert parse_tool_calls(text).calls == [ToolCall("f", {"a": 3})]
        assert parse_tool_calls(text, tools=tools).calls == [ToolCall("f", {"a": "3"})]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": </tool_call>', "not JSON"),
        ("<tool_call></tool_call>", "not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object, but list"),
        ("<tool_call>[1]</tool_call>", "not an object"),
        ("<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", "a key without a value"),
        ("<tool_call>\n<function=f", "no <function"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{oh\n```<｜tool▁call▁end｜>", "not JSON"),
        ("<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>", "no name"),
        ('{"name": "Rome", "size": 3}', "without parameters"),
    ],
)
def test_what_is_no_call_is_handed_back_with_the_reason(text, reason):
    good = '<tool_call>{"name": "clock"}</tool_call>'
    parsed = parse_tool_calls(text)
    assert parsed.calls == [] and len(parsed.malformed) == 1
    assert reason in parsed.malformed[0].reason and parsed.content == text
    if text.startswith("<tool_call>{"):
        assert parse_tool_calls(good + text + good).calls == [CLOCK, CLOCK]


def test_a_text_without_calls_is_said_as_it_is():
    for text in ("It is 15.", "", '{"answer": 15}', "a < b; f(x)", "<think>never ends <tool_call>{}"):
        parsed = parse_tool_calls(text)
        assert (parsed.content, parsed.calls, parsed.malformed) == (text, [], [])


def test_the_format_follows_from_the_chat_template():
    assert template_format("{% if tools %}<tool_call>{% endif %}<|im_start|>") == "hermes"
    assert template_format("<tool_call>{{ name }}<arg_key>") == "glm45"
    assert template_format("<|im_middle|>") == "kimi" and template_format("<|eot_id|>") == "llama3"
    assert template_format(None) is None and template_format("{{ messages }}") is None


def test_a_message_with_calls_comes_back_in_several_forms():
    forms = list(as_messages(TEXTS["hermes"]))
    assert {form["content"] for form in forms} == {"", "I look.", TEXTS["hermes"]}
    assert all(form["tool_calls"][0]["function"] == {"name": "search", "arguments": SEARCH.arguments} for form in forms)
    assert list(as_messages("It is 15.")) == []


PIECES = [piece for text in TEXTS.values() for piece in (text, text[: len(text) // 2], text[len(text) // 3 :])]


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from([*PIECES, "<think>", "</think>", "{", "}", "<tool_call>", ";"]) | st.text(max_size=9)
    ),
    name=st.sampled_from([None, *FORMATS]),
)
def test_no_text_raises_and_nothing_is_lost(pieces, name):
    text = "".join(pieces)
    parsed = parse_tool_calls(text, name)
    assert all(isinstance(call.arguments, dict) and call.name for call in parsed.calls)
    assert all(one.text in parsed.content or one.text.strip() in parsed.content for one in parsed.malformed)
    if not parsed.calls and not parsed.malformed and name is None:
        assert parsed.content == text.strip()


def test_deep_nesting_and_long_texts_end_soon():
    assert parse_tool_calls("<tool_call>" + "[" * 100_000).malformed
    assert parse_tool_calls("<tool_call>" * 5_000 + "{" * 5_000).malformed
    assert parse_tool_calls('{"name": ' + "{" * 100_000).calls == []
