"""The user's functions for logging: each is handed what was made, and may replace what is logged of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from colloid.data.sample import Sample


class LogHooks:
    """`--custom-rollout-log-function-path` and `--custom-eval-rollout-log-function-path`.

    Where a function returns True, the default metrics are skipped. What it puts into the dict `extra_metrics` is logged
    either way.

    Raises:
        HookError: a function cannot be loaded.
    """

    def __init__(self, args: Any):
        self._rollout = _loaded(args, args.custom_rollout_log_function_path, "rollout_log")
        self._evaluation = _loaded(args, args.custom_eval_rollout_log_function_path, "eval_rollout_log")

    async def rollout(
        self,
        rollout_id: int,
        samples: Sequence[Sample],
        extra: dict[str, Any],
        seconds: float,
        default: dict[str, Any],
    ) -> dict[str, Any]:
        """What is logged of a rollout.

        Args:
            extra: metrics of the rollout function, which go before the default ones.
        """
        if self._rollout is None:
            return {**default, **extra}
        return await _called(lambda own: self._rollout(rollout_id, list(samples), own, seconds), extra, default)

    async def evaluation(
        self, rollout_id: int, data: dict[str, dict[str, Any]], extra: dict[str, Any], default: dict[str, Any]
    ) -> dict[str, Any]:
        """What is logged of an evaluation."""
        if self._evaluation is None:
            return {**default, **extra}
        return await _called(lambda own: self._evaluation(rollout_id, data, own), extra, default)


async def _called(
    call: Callable[[dict[str, Any]], Any], extra: dict[str, Any], default: dict[str, Any]
) -> dict[str, Any]:
    own = dict(extra)
    skipped = await asyncio.to_thread(call, own)
    if not skipped:
        return {**default, **own}
    return {name: value for name, value in own.items() if name not in extra or value != extra[name]}


def _loaded(args: Any, path: str | None, kind: str) -> Callable[..., Any] | None:
    if path is None:
        return None
    from colloid.hooks import bind, load_hook

    return bind(load_hook(path, kind), args)
