"""The quick start's reward: 1 for a reply that is the right number and nothing else, 0 for any other.

Used as `--custom-rm-path examples/quickstart/reward.py`. A reward function of your own looks the same: it gets the
options and the sample, and returns a number (or a dict of numbers, with `--reward-key`).
"""

from __future__ import annotations

import re

NUMBER_ALONE = re.compile(r"\s*(-?\d+)\.?\s*")


async def reward_func(args, sample, **kwargs) -> float:
    """`sample.response` is the generated text, `sample.label` the row's label. A reply must have come to its end."""
    ended = sample.status == sample.Status.COMPLETED
    match = NUMBER_ALONE.fullmatch(sample.response.removesuffix("<|im_end|>"))
    return float(ended and match is not None and match.group(1) == sample.label)
