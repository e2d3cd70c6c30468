"""The conversation: code that the model writes is run in the sandbox, and it goes on with what the code printed.

Used as `--custom-generate-function-path examples/retool/generate.py`; `--max-turns` is how often it may speak.
"""

from __future__ import annotations

import re

from colloid.agents.sandbox import run_python
from colloid.rollout import generate_single

CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
FENCE = re.compile(r"\A\s*```(?:python|py)?\n(.*?)\n?```\s*\Z", re.DOTALL)
TIMEOUT = 10.0
"""Seconds of one run."""
SHOWN = 1000
"""Characters of its output that the model sees."""


async def generate(args, sample, sampling_params):
    """`sample.metadata["code_runs"]` counts the runs that ended well, and `"code_errors"` the others."""
    conversation = sample.prompt
    runs = {"code_runs": 0, "code_errors": 0}
    for _ in range(args.max_turns):
        reply = await generate_single(conversation)
        conversation.append({"role": "assistant", "content": reply})
        code = code_of(reply)
        if code is None:
            break
        result = await run_python(code, timeout=TIMEOUT)
        runs["code_runs" if result.ok else "code_errors"] += 1
        conversation.append({"role": "tool", "content": shown(result)})
    sample.metadata |= runs
    return sample


def code_of(reply: str) -> str | None:
    """The last code in a reply, without the fence that may be around it."""
    found = CODE.findall(reply)
    if not found:
        return None
    fenced = FENCE.match(found[-1])
    return fenced.group(1) if fenced else found[-1]


def shown(result) -> str:
    """What the model sees of a run: the end of its output, or why there is none."""
    if result.ok:
        return result.stdout.strip()[-SHOWN:]
    reason = result.stderr.strip() if result.ended == "exit" else f"stopped at the limit: {result.ended}"
    return f"{result.stdout.strip()}\n{reason}".strip()[-SHOWN:]
