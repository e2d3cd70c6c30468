"""Rewards of the user's as the grader calls them: by sample, by group, or in batches of what is waiting.

    sample ──► (SAMPLE) its own call ─────────────────────────────┐
    sample ──► (MODEL, BATCH) queue ──► a call with all that wait ┼──► value, or why there is none
    group  ──► (--group-rm) one call with the whole group ────────┘

Invariants: each sample gets a value or a reason. A batch that raises is called again sample by sample, and one that
takes too long in halves, so that one bad sample does not cost the others theirs; where both halves take too long, the
judge hangs. A wrong number of values cannot be told apart by sample: all of that call are without a reward.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from colloid.data.sample import Sample
from colloid.rewards.custom import apply_changes
from colloid.rewards.forms import Form, reward_form
from colloid.rewards.pool import GradingFailed, TookTooLong, WorkerPool

MAX_BATCH = 64
BATCH_SHARE = 32
"""Samples of a batch that together may take as long again as one sample may."""
_RESERVED = ("prompts", "responses", "completions", "label")

Outcome = Any
"""A reward as it was returned, or a GradingFailed."""


@dataclass
class JudgeOptions:
    """What a user's rewards are called with."""

    hook_args: Any = None
    model_path: str | None = None
    workers: int = 2
    timeout: float = 60.0
    group_rm: bool = False


@dataclass(eq=False)
class Judge:
    """The function or class at one path, in its pool of workers. A model has one worker: it is in memory once."""

    path: str
    form: Form
    options: JudgeOptions
    pool: WorkerPool = field(init=False)
    _waiting: list[tuple[Sample, asyncio.Future]] = field(default_factory=list)
    running: set[asyncio.Task] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pool = WorkerPool(
            1 if self.form is Form.MODEL else self.options.workers,
            tasks_per_worker=1 if self.form.batched else 64,
            shared={"args": self.options.hook_args},
            preload=("colloid.rewards.custom:preload", (self.path, self.options.model_path)),
        )

    async def sample(self, sample: Sample) -> Any:
        """The reward of one sample.

        Raises:
            GradingFailed: there is none.
        """
        if self.form.batched:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((sample, future))
            self._start_call()
            outcome = await future
            if isinstance(outcome, GradingFailed):
                raise outcome
            return outcome
        target = "colloid.rewards.custom:call_custom_reward"
        answer = await self.pool.run(target, (self.path, _sent(sample)), self.options.timeout)
        self._take(answer)
        apply_changes(sample, answer["changes"])
        return answer["reward"]

    async def group(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The rewards of a group, judged in one call."""
        if self.form.batched:
            return await self._batch(samples, retry=False)
        target = "colloid.rewards.custom:call_group_reward"
        try:
            sent = [_sent(sample) for sample in samples]
            answer = await self.pool.run(target, (self.path, sent), self._limit(len(samples)))
            self._take(answer)
            rewards = _counted(answer["rewards"], len(samples))
        except GradingFailed as error:
            return [error] * len(samples)
        for sample, changes in zip(samples, answer["changes"], strict=True):
            apply_changes(sample, changes)
        return rewards

    def _start_call(self) -> None:
        if self._waiting and len(self.running) < self.pool.size:
            task = asyncio.ensure_future(self._call_waiting())
            self.running.add(task)
            task.add_done_callback(self._call_ended)

    def _call_ended(self, task: asyncio.Task) -> None:
        self.running.discard(task)
        self._start_call()

    async def _call_waiting(self) -> None:
        await asyncio.sleep(0)  # What finishes at the same moment joins.
        taken, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        taken = [(sample, future) for sample, future in taken if not future.done()]  # Others were given up.
        if not taken:
            return
        try:
            outcomes = await self._batch([sample for sample, _ in taken])
        except Exception as error:  # A defect of ours: whoever waits has to hear of it.
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), outcome in zip(taken, outcomes, strict=True):
            if not future.done():
                future.set_result(outcome)

    async def _batch(self, samples: Sequence[Sample], retry: bool = True) -> list[Outcome]:
        outcomes = await self._call(samples)
        error = outcomes[0]
        if len(samples) == 1 or not retry or not isinstance(error, (TookTooLong, _Raised)):
            return outcomes
        if isinstance(error, _Raised):
            return [outcome for sample in samples for outcome in await self._call([sample])]
        middle = len(samples) // 2
        halves = [samples[:middle], samples[middle:]]
        results = [await self._call(half) for half in halves]
        slow = [isinstance(result[0], TookTooLong) for result in results]
        if not all(slow):
            for number, half in enumerate(halves):
                if slow[number] and len(half) > 1:
                    results[number] = await self._batch(half)
        return [outcome for result in results for outcome in result]

    async def _call(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One call; where it fails as a whole, the same reason for all."""
        prompts, responses = [sample.prompt for sample in samples], [sample.response for sample in samples]
        arguments = (self.path, self.options.model_path, prompts, responses, columns_of(samples))
        try:
            target = "colloid.rewards.custom:call_batch_reward"
            values = await self.pool.run(target, arguments, self._limit(len(samples)))
            return _counted(values, len(samples))
        except (TookTooLong, _Miscounted) as error:
            return [error] * len(samples)
        except GradingFailed as error:
            return [_Raised(str(error), error.traceback)] * len(samples)

    def _limit(self, count: int) -> float:
        return self.options.timeout * (1 + (count - 1) / BATCH_SHARE)

    def _take(self, answer: dict[str, Any]) -> None:
        if answer["options_read"]:
            self.options.hook_args.mark_read(*answer["options_read"])


class CustomRewards:
    """All rewards of the user's in a run, by path.

    Args:
        paths: those of the run (samples may name others); several are added up with `weights`.
    """

    def __init__(self, paths: Sequence[str], weights: Sequence[float] | None, options: JudgeOptions):
        self.paths = list(paths)
        self._weights = list(weights) if weights else None
        self._options = options
        self._judges: dict[str, Judge] = {}

    async def sample(self, sample: Sample, path: str | None = None) -> Any:
        """The reward of a sample: of the function at `path`, else of the run's.

        Raises:
            GradingFailed: there is none.
        """
        if path is not None or (len(self.paths) == 1 and self._weights is None):
            return await self._judge(path or self.paths[0]).sample(sample)
        calls = [self._judge(one).sample(sample) for one in self.paths]
        return self._sum(await asyncio.gather(*calls, return_exceptions=True))

    async def group(self, samples: Sequence[Sample], path: str | None = None) -> list[Outcome]:
        """The rewards of the samples of a group, or the reasons why there are none."""
        if path is not None or (len(self.paths) == 1 and self._weights is None):
            return await self._judge(path or self.paths[0]).group(samples)
        columns = await asyncio.gather(*(self._judge(one).group(samples) for one in self.paths))
        outcomes = []
        for parts in zip(*columns, strict=True):
            try:
                outcomes.append(self._sum(parts))
            except GradingFailed as error:
                outcomes.append(error)
        return outcomes

    async def close(self) -> None:
        """Kills all workers; what still waits hears that there is no reward."""
        for judge in self._judges.values():
            await judge.pool.close()
            while judge.running:  # A call that ends starts the next, of those that wait.
                await asyncio.gather(*judge.running, return_exceptions=True)

    def _judge(self, path: str) -> Judge:
        if path not in self._judges:
            self._judges[path] = Judge(path, reward_form(path, self._options.group_rm), self._options)
        return self._judges[path]

    def _sum(self, parts: Sequence[Outcome]) -> dict[str, float]:
        """`score`, the weighted sum, beside what each function gave under its name."""
        rewards, total = {}, 0.0
        weights = self._weights or [1.0] * len(self.paths)
        for name, weight, part in zip(_names(self.paths), weights, parts, strict=True):
            if isinstance(part, GradingFailed):
                raise GradingFailed(f"{name}: {part}", part.traceback)
            if isinstance(part, BaseException):
                raise part
            if not isinstance(part, (bool, int, float)):
                raise GradingFailed(f"{name}: the reward must be a number to be added up, and is {part!r:.200}")
            rewards[name] = float(part)
            total += weight * float(part)
        return {**rewards, "score": total}


class _Raised(GradingFailed):
    """The user's code raised, or its worker died; perhaps because of one sample."""


class _Miscounted(GradingFailed):
    """Another number of values than of samples."""


def _sent(sample: Sample) -> Sample:
    """As a worker gets it: without the experts that the engine chose, which are megabytes of no use to a reward."""
    twin = copy.copy(sample)
    twin.rollout_routed_experts = None
    return twin


def columns_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """`label` and every key of the samples' metadata as a list with one entry a sample, None where it has none."""
    keys = {key: None for sample in samples for key in sample.metadata if key not in _RESERVED}
    columns = {str(key): [sample.metadata.get(key) for sample in samples] for key in keys}
    return {**columns, "label": [sample.label for sample in samples]}


def _counted(values: list[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise _Miscounted(f"it returned {len(values)} values for {count} samples")
    return values


def _names(paths: Sequence[str]) -> list[str]:
    """Short names of functions, all different: what stands after the last `:`, `/` or `.`."""
    short = [path.removesuffix(".py").replace("/", ":").replace(".py:", ":") for path in paths]
    short = [name.rsplit(":", 1)[-1].rsplit(".", 1)[-1] for name in short]
    return [name if short.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(short)]
