"""The built-in rewards, by the name that `--rm-type` or a sample's `metadata["rm_type"]` gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from colloid.errors import ConfigError
from colloid.rewards.math import fast_verdict
from colloid.rewards.random import random_reward


@dataclass(frozen=True)
class GradeInput:
    """What a built-in reward may look at."""

    response: str
    label: str | None
    sample_index: int
    seed: int


@dataclass(frozen=True)
class BuiltinReward:
    """One reward: a quick part that runs in place, and a slow one for what that leaves open."""

    quick: Callable[[GradeInput], float | None]
    """The reward; None: `slow` must tell."""
    slow: str | None = None
    """`module:function` of (response, label) -> float, run in a worker process."""
    needs_label: bool = True


def _quick_math(given: GradeInput) -> float | None:
    verdict = fast_verdict(given.response, given.label or "")
    return None if verdict is None else float(verdict)


REWARDS: dict[str, BuiltinReward] = {
    "math": BuiltinReward(_quick_math, slow="colloid.rewards.math:verify"),
    "random": BuiltinReward(
        lambda given: random_reward(given.seed, given.sample_index, given.response), needs_label=False
    ),
}


def get_reward(name: str) -> BuiltinReward:
    """The built-in reward of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in REWARDS:
        raise ConfigError(
            f"unknown reward type {name!r}: --rm-type (or a row's metadata['rm_type']) is one of {', '.join(REWARDS)}; "
            "a reward of your own goes with --custom-rm-path"
        )
    return REWARDS[name]


def reward_number(value: object) -> float:
    """A reward as a finite number.

    Raises:
        ValueError: it is not one (None, a text, NaN, …).
    """
    if isinstance(value, (bool, int, float)):
        number = float(value)
        if number - number == 0.0:
            return number
    raise ValueError(f"the reward must be a finite number, and is {value!r} ({type(value).__name__})")
