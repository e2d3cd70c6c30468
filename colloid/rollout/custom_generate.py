"""Calls the user's generate function for one sample, and checks what comes back."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from colloid.data.sample import Sample, Status
from colloid.errors import HookError
from colloid.rollout.client import EngineClient
from colloid.rollout.options import SamplingOptions, request_seed

GenerateFunction = Callable[..., Awaitable[Any]]
"""`(sample, sampling_params, evaluation=…) -> Sample or list of Samples`."""

CUSTOM_DEADLINE = 1800.0
"""Seconds in which neither the user's generate function nor any request of the run has moved."""

_TURN_SEEDS: contextvars.ContextVar[Callable[[], int] | None] = contextvars.ContextVar("colloid_turns", default=None)


def next_turn_seed() -> int | None:
    """The sampling seed of the next request of the sample that is being generated; None outside of one."""
    seeds = _TURN_SEEDS.get()
    return None if seeds is None else seeds()


class CustomGenerate:
    """The user's functions, for the samples of one rollout or one evaluation set.

    Args:
        load: the function of a path.
    """

    def __init__(
        self,
        client: EngineClient,
        sampling: SamplingOptions,
        load: Callable[[str], GenerateFunction],
        *,
        rollout_id: int,
        evaluation: bool,
    ):
        self._client = client
        self._sampling = sampling
        self._load = load
        self._rollout_id = rollout_id
        self._evaluation = evaluation

    async def one(self, path: str, sample: Sample, params: dict[str, Any]) -> list[Sample]:
        """What the function makes of one sample: it, or the parts that it was split into.

        Raises:
            HookError: it raised, or returned something else.
        """
        turn = -1

        def seeds() -> int:
            nonlocal turn
            turn += 1
            return request_seed(self._sampling.seed, self._rollout_id, sample.index or 0, turn)

        token = _TURN_SEEDS.set(seeds)
        try:
            call = self._load(path)(sample, params, evaluation=self._evaluation)
            result = await self._while_progress(call, f"sample {sample.index}")
        finally:
            _TURN_SEEDS.reset(token)
        samples = result if isinstance(result, list) else [result]
        if not samples or not all(isinstance(one, Sample) for one in samples):
            raise HookError(f"it must return a Sample or a list of Samples, and returned {result!r:.200}")
        for one in samples:
            if len(samples) > 1 and one.rollout_id is None:
                one.rollout_id = sample.index
            _check_custom(one)
        return samples

    async def _while_progress(self, call: Awaitable[Any], name: str) -> Any:
        """The result of a user's coroutine, which is given up where nothing at all has moved for too long."""
        clock = asyncio.get_running_loop().time
        started = clock()
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                silent = clock() - max(started, self._client.last_progress)
                if silent > CUSTOM_DEADLINE:
                    raise TimeoutError(f"{name}: nothing moved for {silent:.0f} s, it is given up")
                await asyncio.wait({task}, timeout=CUSTOM_DEADLINE - silent + 0.01)
            return task.result()
        finally:
            task.cancel()


def _check_custom(sample: Sample) -> None:
    """What the arrays of a sample that a user's function filled must be like for training."""
    if sample.status is Status.FAILED:
        return
    if sample.response_length and len(sample.tokens) < sample.response_length:
        raise HookError(
            f"sample {sample.index} has response_length {sample.response_length} and only {len(sample.tokens)} tokens: "
            "tokens must hold the prompt's ids and then the response's"
        )
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != sample.response_length:
            raise HookError(
                f"sample {sample.index} has {len(values)} entries in {name} for {sample.response_length} response "
                "tokens: append all of them together, with sample.append_response_tokens"
            )
    if sample.status is Status.PENDING:
        sample.status = Status.COMPLETED
