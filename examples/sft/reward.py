"""The example's measure, in evaluation: 1 where the model says exactly what it was taught, and then stops."""

from __future__ import annotations


async def reward_func(args, sample, **kwargs) -> float:
    """0 or 1."""
    return float(sample.response == sample.label and sample.status is sample.Status.COMPLETED)
