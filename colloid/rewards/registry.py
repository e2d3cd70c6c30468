"""The built-in rewards, by the name that `--rm-type` or a sample's `metadata["rm_type"]` gives.

A name may begin with `boxed_`: then only what stands in the response's last `\\boxed{…}` is graded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from colloid.errors import ConfigError
from colloid.rewards.dapo import dapo_reward
from colloid.rewards.deepscaler import quick_verdict
from colloid.rewards.extract import last_boxed
from colloid.rewards.f1 import f1_reward
from colloid.rewards.gpqa import gpqa_reward, right_letter
from colloid.rewards.ifbench import row_problem
from colloid.rewards.math import fast_verdict
from colloid.rewards.random import random_reward

BOXED = "boxed_"
REMOTE = "remote_rm"


@dataclass(frozen=True)
class GradeInput:
    """What a built-in reward may look at. `label` and `metadata` are the row's."""

    response: str
    label: Any
    sample_index: int = 0
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BuiltinReward:
    """One reward: a quick part that runs in place, and a slow one for what that leaves open.

    Attributes:
        quick: the reward; None: `slow` must tell.
        slow: `module:function` of (response, label, metadata), run in a worker process.
        needs_label: whether a row must have a label.
        problem: of (label, metadata): what keeps a row from being graded, or None.
        answer: how an answer that was taken out of its box is handed over.
    """

    quick: Callable[[GradeInput], float | dict[str, Any] | None]
    slow: str | None = None
    needs_label: bool = True
    problem: Callable[[Any, dict[str, Any]], str | None] | None = None
    answer: str = "{}"


def _quick_math(given: GradeInput) -> float | None:
    verdict = fast_verdict(given.response, str(given.label))
    return None if verdict is None else float(verdict)


def _choice_problem(label: Any, metadata: dict[str, Any]) -> str | None:
    known = right_letter(label, metadata) or metadata.get("correct_answer") or metadata.get("answer_text") or label
    return None if known else "no right choice: give a label, or correct_letter in the metadata"


REWARDS: dict[str, BuiltinReward] = {
    "math": BuiltinReward(_quick_math, slow="colloid.rewards.math:grade", answer="\\boxed{{{}}}"),
    "dapo": BuiltinReward(lambda given: dapo_reward(given.response, given.label), answer="Answer: {}"),
    "deepscaler": BuiltinReward(
        lambda given: quick_verdict(given.response, given.label),
        slow="colloid.rewards.deepscaler:verify",
        answer="</think>\\boxed{{{}}}",
    ),
    "gpqa": BuiltinReward(
        lambda given: gpqa_reward(given.response, given.label, given.metadata),
        needs_label=False,
        problem=_choice_problem,
    ),
    "f1": BuiltinReward(lambda given: f1_reward(given.response, _texts(given.label))),
    "ifbench": BuiltinReward(
        lambda given: None, slow="colloid.rewards.ifbench:grade", needs_label=False, problem=row_problem
    ),
    REMOTE: BuiltinReward(lambda given: None, needs_label=False),
    "random": BuiltinReward(
        lambda given: random_reward(given.seed, given.sample_index, given.response), needs_label=False
    ),
}


def get_reward(name: str) -> BuiltinReward:
    """The built-in reward of that name, with or without `boxed_`.

    Raises:
        ConfigError: there is none.
    """
    plain = name.removeprefix(BOXED)
    if plain not in REWARDS:
        raise ConfigError(
            f"unknown reward type {name!r}: --rm-type (or a row's metadata['rm_type']) is one of {', '.join(REWARDS)}, "
            f"or one of them after {BOXED}; a reward of your own goes with --custom-rm-path"
        )
    return REWARDS[plain]


def is_remote(name: str | None) -> bool:
    """Whether the reward comes from the server at `--rm-url`."""
    return name is not None and name.removeprefix(BOXED) == REMOTE


def graded_part(name: str, given: GradeInput) -> GradeInput:
    """The input as the reward of that name sees it: with `boxed_` the boxed answer alone; "" where there is none."""
    if not name.startswith(BOXED):
        return given
    answer = last_boxed(given.response)
    return replace(given, response="" if answer is None else get_reward(name).answer.format(answer))


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


def _texts(label: Any) -> str | list[str]:
    return [str(one) for one in label] if isinstance(label, (list, tuple)) else str(label)
