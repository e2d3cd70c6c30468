"""The share of an answer's characters that are digits."""


async def reward_func(args, sample, **kwargs) -> float:
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)
