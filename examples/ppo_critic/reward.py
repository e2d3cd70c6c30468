"""The example's reward, at the end of an answer: the share of its characters that are digits, times the row's label.

Used as `--custom-rm-path examples/ppo_critic/reward.py`. The question tells what its answer can be worth, and the
answer so far what share of it is reached: there is something for a critic to learn.
"""

from __future__ import annotations


async def reward_func(args, sample, **kwargs) -> float:
    """From 0 to the label."""
    share = sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)
    return float(sample.label) * share
