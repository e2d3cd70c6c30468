"""Lets an agent solve each question, in a process of its own, and hands over what its session has recorded.

Used as `--custom-generate-function-path examples/black_box_agent/generate.py`.
"""

from __future__ import annotations

from colloid.agents import session
from examples.black_box_agent import anthropic_agent, openai_agent

TIMEOUT = 120
"""Seconds for an episode; after that its process is killed, and the sample is FAILED."""


async def generate(args, sample, sampling_params):
    """The sample with its turns. The row says by which client it is solved."""
    question = sample.prompt[-1]["content"]
    async with session(args, sample, sampling_params) as episode:
        if sample.metadata["client"] == "anthropic":
            solve, url = anthropic_agent.solve, episode.anthropic_base_url
        else:
            solve, url = openai_agent.solve, episode.base_url
        answer = await episode.run(solve, question, url, episode.api_key, timeout=TIMEOUT)
    return episode.samples(reward=float(answer.strip() == sample.label))
