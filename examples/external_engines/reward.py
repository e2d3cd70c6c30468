"""The example's reward: the share of an answer's characters that are digits."""

from __future__ import annotations


async def reward_func(args, sample, **kwargs) -> float:
    """From 0 to 1."""
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)
