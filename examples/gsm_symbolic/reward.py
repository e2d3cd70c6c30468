"""The verifier of reasoning-gym as a reward: `--custom-rm-path examples/gsm_symbolic/reward.py`.

It is asked with what stands in the last `<answer></answer>`, or with the whole response where there is none. For
gsm_symbolic a right number is worth 1, another number 0.01, and what is no number 0.
"""

from __future__ import annotations

import functools
import re


@functools.cache
def verifier(dataset: str):
    """The data set whose verifier is asked; made once a process."""
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, size=1, seed=0)


async def reward_func(args, sample, **kwargs) -> float:
    """From 0 to 1."""
    answers = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    answer = (answers[-1] if answers else sample.response).strip()
    return float(verifier(sample.metadata["dataset"]).score_answer(answer, sample.metadata["entry"]))
