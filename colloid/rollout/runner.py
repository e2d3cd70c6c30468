"""Runs the samples of groups: generation (built-in, or the user's function) and then grading, all concurrently.

A sample whose generate function or reward raises is FAILED: counted, logged once a kind, without a vote. Where every
sample of a rollout failed, `check_not_all_failed` ends the run with the first reason.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from colloid.data.sample import Sample, Status
from colloid.data.source import Group, is_finished
from colloid.errors import DeadlineExceeded, EngineError, HookError
from colloid.rollout.client import EngineClient, RequestAborted, RequestRefused, RequestScope
from colloid.rollout.generate_sample import ensure_prompt_tokens, generate_sample
from colloid.rollout.grading import Grader
from colloid.rollout.options import SamplingOptions, request_seed

GenerateFunction = Callable[..., Awaitable[Any]]
"""`(sample, sampling_params, evaluation=…) -> Sample or list of Samples`."""

GENERATION = "generation"
"""Names the built-in generation where a failure is recorded."""
CUSTOM_DEADLINE = 1800.0
"""Seconds in which neither the user's generate function nor any request of the run has moved."""

_TURN_SEEDS: contextvars.ContextVar[Callable[[], int] | None] = contextvars.ContextVar("colloid_turns", default=None)


def next_turn_seed() -> int | None:
    """The sampling seed of the next request of the sample that is being generated; None outside of one."""
    seeds = _TURN_SEEDS.get()
    return None if seeds is None else seeds()


class GroupRunner:
    """For the groups of one rollout, or of one evaluation set.

    Args:
        rollout_id: enters the seeds.
        custom_generate: the user's function by the path of the option; `load_generate` loads one by its path.
        scope: its abort ends generation, and grading is not waited for.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer,
        grader: Grader,
        sampling: SamplingOptions,
        scope: RequestScope,
        *,
        rollout_id: int,
        custom_generate: str | None = None,
        load_generate: Callable[[str], GenerateFunction] | None = None,
        evaluation: bool = False,
        reward_key: str | None = None,
    ):
        self._client = client
        self._tokenizer = tokenizer
        self._grader = grader
        self._sampling = sampling
        self._scope = scope
        self._rollout_id = rollout_id
        self._custom_generate = custom_generate
        self._load_generate = load_generate
        self._evaluation = evaluation
        self._reward_key = reward_key
        self._grading: set[asyncio.Task] = set()

    async def run(self, group: Group) -> Group:
        """The finished samples of a group, in order; of a fanned-out rollout all parts, one after another.

        After an abort of the scope, a group that did not get to its end comes back as bare prompts.
        """
        if is_finished(group):
            return list(group)
        bare = copy.deepcopy(group)
        parts = await gather_or_cancel(*(self._sample(sample) for sample in group))
        finished = [sample for samples in parts for sample in samples]
        return finished if is_finished(finished) else bare

    def abort_grading(self) -> None:
        """Nothing waits for a slow judge any more; the samples that it had not judged stay without a reward."""
        for task in self._grading:
            task.cancel()

    async def _sample(self, sample: Sample) -> list[Sample]:
        path = sample.generate_function_path or self._custom_generate
        samples = [sample]
        try:
            ensure_prompt_tokens(sample, self._tokenizer, self._sampling)
            params = self._sampling.request_params(len(sample.tokens), self._rollout_id, sample.index or 0)
            if path is None:
                await generate_sample(sample, self._client, self._tokenizer, self._sampling, params)
            else:
                samples = await self._custom(path, sample, params)
        except RequestAborted:
            sample.status = Status.ABORTED
            return [sample]
        except RequestRefused as error:
            self._grader.mark_failed(sample, GENERATION, error)
            return [sample]
        except (EngineError, DeadlineExceeded):
            raise
        except Exception as error:  # A user's function may raise anything; the built-in path only its own errors.
            if path is None:
                raise
            self._grader.mark_failed(sample, f"generate function {path}", error, traceback.format_exc())
            return [sample]
        await gather_or_cancel(*(self._grade(one) for one in samples))
        return samples

    async def _custom(self, path: str, sample: Sample, params: dict[str, Any]) -> list[Sample]:
        turn = -1

        def seeds() -> int:
            nonlocal turn
            turn += 1
            return request_seed(self._sampling.seed, self._rollout_id, sample.index or 0, turn)

        token = _TURN_SEEDS.set(seeds)
        try:
            call = self._load_generate(path)(sample, params, evaluation=self._evaluation)
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

    async def _grade(self, sample: Sample) -> None:
        if self._scope.aborted or sample.status in (Status.ABORTED, Status.PENDING):
            return
        task = asyncio.ensure_future(self._grader.grade(sample, self._reward_key))
        self._grading.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._grading.discard(task)
        if not task.cancelled():
            task.result()


async def gather_or_cancel(*coroutines: Awaitable[Any]) -> list[Any]:
    """As `asyncio.gather`, but where one raises, the others are cancelled and have ended before it is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def check_not_all_failed(samples: Iterable[Sample], what: str) -> int:
    """The number of FAILED samples.

    Raises:
        HookError, EngineError: all are, and so there is nothing to train on or to measure; with the first reason.
    """
    samples = list(samples)
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    if samples and len(failed) == len(samples):
        reason = failed[0].metadata.get("error", "the generate function set the status FAILED")
        kind = EngineError if reason.startswith(GENERATION) else HookError
        raise kind(f"all {len(samples)} samples of {what} FAILED. The first (sample {failed[0].index}): {reason}")
    return len(failed)


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
