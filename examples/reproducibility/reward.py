"""The share of an answer's characters that are digits; each answer is judged after a wait that nobody can foretell."""

import asyncio
import random

LONGEST = 0.3
"""Seconds."""
_chance = random.SystemRandom()  # not seeded: other waits in each run


async def reward_func(args, sample, **kwargs) -> float:
    await asyncio.sleep(_chance.random() * LONGEST)
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)
