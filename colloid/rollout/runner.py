"""Runs the samples of groups: generation (built-in, or the user's function) and then grading, all concurrently.

A sample whose generate function or reward raises is FAILED: counted, logged once a kind, without a vote. Where every
sample of a rollout failed, `check_not_all_failed` ends the run with the first reason.
"""

from __future__ import annotations

import asyncio
import copy
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from colloid.data.sample import Sample, Status
from colloid.data.source import Group, is_finished
from colloid.errors import DeadlineExceeded, EngineError, HookError
from colloid.rollout.client import EngineClient, RequestAborted, RequestRefused, RequestScope
from colloid.rollout.custom_generate import CustomGenerate, GenerateFunction
from colloid.rollout.generate_sample import ensure_prompt_tokens, generate_sample
from colloid.rollout.grading import Grader
from colloid.rollout.options import SamplingOptions

GENERATION = "generation"
"""Names the built-in generation where a failure is recorded."""


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
        self._custom = CustomGenerate(client, sampling, load_generate, rollout_id=rollout_id, evaluation=evaluation)
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
                samples = await self._custom.one(path, sample, params)
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
