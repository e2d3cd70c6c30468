"""`--custom-reward-post-process-path`: the user's `(args, samples) -> (raw_rewards, rewards)` in place of the baseline.

`raw_rewards` are logged; `rewards` are what advantages are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from colloid.data.columns import voting_samples
from colloid.data.sample import Sample
from colloid.errors import HookError


def post_processed(args: Any, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """float64 [B] twice: raw rewards (NaN where a sample FAILED), and those to train on (0 there).

    Raises:
        HookError: the function cannot be loaded, raised, or returned something else.
    """
    from colloid.hooks import bind, load_hook

    hook = bind(load_hook(args.custom_reward_post_process_path, "custom_reward_post_process"), args)
    result = hook(list(samples))
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise HookError(f"{hook.name} must return (raw_rewards, rewards), and returned {result!r:.200}")
    voting = voting_samples(samples)
    raw = _numbers(hook.name, "raw_rewards", result[0], samples, voting)
    return np.where(voting, raw, np.nan), _numbers(hook.name, "rewards", result[1], samples, voting)


def _numbers(name: str, what: str, values: Any, samples: Sequence[Sample], voting: np.ndarray) -> np.ndarray:
    """The values of the voting samples, which must be finite; 0 for the others, whatever was given for them."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        count = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
        raise HookError(f"{name} must return one of {what} for each of {len(samples)} samples, and returned {count}")
    numbers = np.zeros(len(samples))
    for row in np.flatnonzero(voting):
        try:
            numbers[row] = float(values[row])
        except (TypeError, ValueError):
            numbers[row] = np.nan
        if not np.isfinite(numbers[row]):
            raise HookError(
                f"{name}: {what} must be finite numbers, and that of sample {samples[row].index} is {values[row]!r}"
            )
    return numbers
