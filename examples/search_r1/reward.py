"""The reward: 1 for the right name between `<answer>` and `</answer>` in the last reply, else 0.

Used as `--custom-rm-path examples/search_r1/reward.py`.
"""

from __future__ import annotations

import re

ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


async def reward_func(args, sample, **kwargs) -> float:
    """What the tool said does not count: only the last message, and only the assistant's."""
    last = sample.metadata["messages"][-1]
    found = ANSWER.findall(last["content"]) if last["role"] == "assistant" else []
    return float(bool(found) and found[-1].lower() == sample.label.lower())
