"""Dynamic filters: which finished groups are worth training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colloid.data.sample import Sample, Status
from colloid.errors import HookError
from colloid.rollout.types import DynamicFilterOutput

TOLERANCE = 1e-6
"""Rewards this close are equal, as in reward shaping."""


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drops a group whose rewards are all equal: it has no gradient. For `--dynamic-sampling-filter-path`."""
    key = getattr(args, "reward_key", None)
    rewards = [sample.get_reward_value(key) for sample in samples if sample.status is not Status.FAILED]
    if not rewards:
        return DynamicFilterOutput(False, reason="all_failed", keep_when_insufficient=True)
    if max(rewards) - min(rewards) > TOLERANCE:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, reason=f"zero_std_{round(rewards[0], 1):g}", keep_when_insufficient=True)


def filter_output(value: Any, name: str) -> DynamicFilterOutput:
    """What a filter returned, checked."""
    if isinstance(value, DynamicFilterOutput):
        return value
    if isinstance(value, bool):
        return DynamicFilterOutput(value)
    raise HookError(f"{name} must return a DynamicFilterOutput or a bool, and returned {value!r}")


def load_filter(path: str, args: Any) -> Callable[[list[Sample]], DynamicFilterOutput]:
    """The filter at `path`, bound to `args`; its output checked, its errors named."""
    from colloid.hooks import bind, load_hook

    hook = bind(load_hook(path, "dynamic_filter"), args)
    name = f"--dynamic-sampling-filter-path {path}"

    def run(samples: list[Sample]) -> DynamicFilterOutput:
        try:
            value = hook(samples)
        except Exception as error:  # A user's function may raise anything.
            raise HookError(f"{name} raised on the group of sample {samples[0].index}: {error!r}") from error
        return filter_output(value, name)

    return run
