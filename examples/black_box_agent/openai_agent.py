"""An agent as anybody writes one: a loop around OpenAI's client, with a tool. It knows nothing of training."""

from __future__ import annotations

import json

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def add(arguments: dict) -> str:
    """The tool. What the model got wrong is told to the model."""
    try:
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


def solve(question: str, base_url: str, api_key: str, max_turns: int = 4) -> str:
    """The answer to a question."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        answer = client.chat.completions.create(model="gpt-5", messages=messages, tools=[ADD])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            content = add(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return message.content or ""
