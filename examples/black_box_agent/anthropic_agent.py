"""The same agent around Anthropic's client, which streams its answers."""

from __future__ import annotations

import anthropic

from examples.black_box_agent.openai_agent import ADD, add

TOOL = {
    "name": "add",
    "description": ADD["function"]["description"],
    "input_schema": ADD["function"]["parameters"],
}


def solve(question: str, base_url: str, api_key: str, max_turns: int = 4) -> str:
    """The answer to a question."""
    client = anthropic.Anthropic(base_url=base_url, api_key=api_key)
    messages: list = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        with client.messages.stream(model="claude", max_tokens=64, messages=messages, tools=[TOOL]) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content or "…"})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in calls]
        messages.append({"role": "user", "content": results})
    return "".join(block.text for block in answer.content if block.type == "text")
