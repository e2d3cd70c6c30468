"""Runs the samples of groups: generation (built-in, or the user's function) and then grading, all concurrently.

A sample whose generate function, reward or sample hook raises is FAILED: counted, logged once a kind, without a vote.
Where every sample of a rollout failed, `check_not_all_failed` ends the run with the first reason.

What an abort stops: with `--partial-rollout` each sample keeps what it has (a finished one is done, an ungraded one is
only graded later, the others go on within what is left of their budget); without, the group starts anew as a whole.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from colloid.data.groups import (
    Group,
    copy_group,
    flatten,
    has_ended,
    is_finished,
    is_finished_sample,
    restore_sample,
)
from colloid.data.sample import Sample, Status
from colloid.errors import DeadlineExceeded, EngineError, HookError
from colloid.rollout.client import EngineClient, RequestAborted, RequestRefused
from colloid.rollout.custom_generate import CustomGenerate, GenerateFunction, is_forked, share_rewards
from colloid.rollout.generate_sample import ensure_prompt_tokens, generate_sample
from colloid.rollout.grading import Grader
from colloid.rollout.options import PartialOptions, SamplingOptions
from colloid.rollout.scopes import RequestScope, watch_cuts
from colloid.rollout.staleness import NUM_PROMPT_MESSAGES

logger = logging.getLogger(__name__)

GENERATION = "generation"
"""Names the built-in generation where a failure is recorded."""


class GroupRunner:
    """For the groups of one rollout, or of one evaluation set.

    Args:
        rollout_id: enters the seeds.
        custom_generate: the user's function by the path of the option; `load_generate` loads one by its path.
        scope: its abort ends generation, and grading is not waited for.
        end_ids: tokens that end generation, beside the tokenizer's own end token.
        partial: whether what an abort stops goes on later.
        sample_hooks: `(sample, rollout_id=…, evaluation=…) -> Sample or None`, called in order with each sample that
            was generated to its end and graded, once.
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
        end_ids: Sequence[int] = (),
        partial: PartialOptions | None = None,
        sample_hooks: Sequence[Callable[..., Any]] = (),
    ):
        self._client = client
        self._tokenizer = tokenizer
        self._grader = grader
        self._sampling = sampling
        self._scope = scope
        self._rollout_id = rollout_id
        self._custom_generate = custom_generate
        self._custom = CustomGenerate(
            *(client, tokenizer, sampling, load_generate),
            rollout_id=rollout_id,
            evaluation=evaluation,
            end_ids=end_ids,
        )
        self._reward_key = reward_key
        self._evaluation = evaluation
        self._partial = partial or PartialOptions()
        self._sample_hooks = sample_hooks
        self._grading: set[asyncio.Task] = set()
        self.restarted = 0
        """Samples whose generate function went on after an abort: they are again as they were handed to it."""

    async def run(self, group: Group) -> Group:
        """The samples of a group, in order; of a fanned-out rollout all parts, one after another.

        All of them are finished, unless the scope was aborted or a generate function gave one up: then the group comes
        back with what it has, or without `--partial-rollout` as it was before.
        """
        if is_finished(group):
            return list(group)
        members = flatten(group)
        if self._partial.mask_earlier:
            for sample in members:
                if sample.response_length:
                    sample.loss_mask = [0] * sample.response_length
        before = copy_group(members)
        with self._custom.together([one for one in members if not has_ended(one)], self._custom_generate):
            parts = await gather_or_cancel(*(self._sample(*pair) for pair in zip(members, before, strict=True)))
        samples = [sample for part in parts for sample in part]
        if self._grader.whole_groups:
            samples = await self._judge_group(samples)
        share_rewards(samples)
        return samples if self._partial.enabled or is_finished(samples) else before

    def abort_grading(self) -> None:
        """Nothing waits for a slow judge any more; the samples that it had not judged stay without a reward."""
        for task in self._grading:
            task.cancel()

    async def _sample(self, sample: Sample, before: Sample) -> list[Sample]:
        if is_finished_sample(sample):
            return [sample]
        samples = [sample] if has_ended(sample) else await self._generate(sample, before)
        if self._grader.whole_groups:
            return samples
        await gather_or_cancel(*(self._grade(one) for one in samples if not is_forked(one)))
        share_rewards(samples)
        return [await self._call_hooks(one) if is_finished_sample(one) else one for one in samples]

    async def _generate(self, sample: Sample, before: Sample) -> list[Sample]:
        """The sample with its response, or the parts that a user's function made of it."""
        path = sample.generate_function_path or self._custom_generate
        samples, cuts = [sample], watch_cuts()
        sample.status = Status.PENDING
        try:
            ensure_prompt_tokens(sample, self._tokenizer, self._sampling)
            params = self._sampling.request_params(
                *(len(sample.tokens), self._rollout_id, sample.index or 0), response_length=sample.response_length
            )
            if path is None:
                await generate_sample(sample, self._client, self._tokenizer, self._sampling, params)
            else:
                samples = await self._custom.one(path, sample, params)
        except RequestAborted:
            return [self._stopped(sample, before, cuts)]
        except RequestRefused as error:
            self._grader.mark_failed(sample, GENERATION, error)
            return [sample]
        except (EngineError, DeadlineExceeded, asyncio.CancelledError):
            self._stopped(sample, before, cuts)
            raise
        except Exception as error:  # A user's function may raise anything; the built-in path only its own errors.
            if path is None:
                raise
            if self._scope.aborted:  # Most likely for want of an answer; it has another try.
                return [self._stopped(sample, before, cuts)]
            self._grader.mark_failed(sample, f"generate function {path}", error, traceback.format_exc())
            return [sample]
        if cuts and not any(one.status is Status.ABORTED for one in samples):
            return [self._stopped(sample, before, cuts)]
        for one in samples:
            if isinstance(before.prompt, list) and len(one.prompt) > len(before.prompt):
                one.metadata.setdefault(NUM_PROMPT_MESSAGES, len(before.prompt))
            one.index = sample.index if one.index is None else one.index
            one.group_index = sample.group_index if one.group_index is None else one.group_index
        return samples

    def _stopped(self, sample: Sample, before: Sample, cuts: list[str]) -> Sample:
        """The sample as it can go on: with what it recorded, unless its function took a cut answer for a whole one."""
        if cuts and sample.status is not Status.ABORTED:
            restore_sample(sample, before)
            self.restarted += 1
            if self.restarted == 1 and self._partial.enabled:
                logger.warning(
                    "the generate function of sample %s went on after an answer that an abort had cut short "
                    '(finish_reason "abort"): what it made is dropped, and it is called again in the next rollout. Let '
                    "it set the status ABORTED and return the sample there",
                    sample.index,
                )
        sample.status, sample.reward = Status.ABORTED, None
        return sample

    async def _call_hooks(self, sample: Sample) -> Sample:
        for hook in self._sample_hooks:
            if sample.status is Status.FAILED:
                break
            try:
                result = hook(sample, rollout_id=self._rollout_id, evaluation=self._evaluation)
                result = await result if inspect.isawaitable(result) else result
                if result is not None and not isinstance(result, Sample):
                    raise HookError(f"it must return a Sample or None, and returned {result!r:.200}")
            except Exception as error:  # A user's function may raise anything.
                name = f"sample hook {getattr(hook, 'path', hook)}"
                self._grader.mark_failed(sample, name, error, traceback.format_exc())
            else:
                sample = sample if result is None else result
        return sample

    async def _judge_group(self, samples: list[Sample]) -> list[Sample]:
        """Rewards for all samples together, once all have ended."""
        if self._scope.aborted or not all(has_ended(sample) for sample in samples):
            return samples
        new = [not is_finished_sample(sample) for sample in samples]
        judged = [sample for sample in samples if not is_forked(sample)]
        await self._judge(self._grader.grade_group(judged, self._reward_key))
        share_rewards(samples)
        pairs = zip(samples, new, strict=True)
        return [await self._call_hooks(one) if is_new and is_finished_sample(one) else one for one, is_new in pairs]

    async def _grade(self, sample: Sample) -> None:
        if self._scope.aborted or sample.status in (Status.ABORTED, Status.PENDING):
            return
        await self._judge(self._grader.grade(sample, self._reward_key))

    async def _judge(self, grading: Awaitable[None]) -> None:
        """Waits for the grader, unless `abort_grading` ends that."""
        task = asyncio.ensure_future(grading)
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
