"""Two roles, one policy: a solver answers, and a critic who sees question and answer gives the final one.

Used as `--custom-generate-function-path examples/multi_agent/generate.py`. The critic's conversation is another one
than the solver's, so that the rollout becomes two samples: siblings, which share the reward of the final answer, and
weigh as one rollout in the loss.
"""

from __future__ import annotations

from colloid.rollout import generate_single


def review(question: str, draft: str) -> str:
    """What the critic is asked."""
    return f"{question} They say: {draft}"


async def generate(args, sample, sampling_params):
    """The sample, whose response is the critic's; what the solver sampled is recorded beside it."""
    draft = await generate_single(sample.prompt)
    asked = review(sample.prompt[-1]["content"], draft)
    await generate_single([{"role": "user", "content": asked}])
    sample.metadata["draft"] = draft
    return sample


async def reward_func(args, sample, **kwargs) -> float:
    """1 for the right sentence at the end, else 0."""
    return float(sample.response == sample.label)
