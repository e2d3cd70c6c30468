"""Calls the user's generate function, for one sample or for a whole group, and checks what comes back.

Two forms: A takes a sample, and gives back it or the parts that its rollout was split into; B takes the samples of a
group at once, and gives all of them back. Tokens come from `generate_single`, which records them, or the function
appends them itself (`sample.append_response_tokens`), or it sets the text alone, which is then tokenised once.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from colloid.agents.tool_calls import as_messages, template_format
from colloid.data.ledger import FORKED
from colloid.data.sample import Sample, Status
from colloid.data.turns import TurnRenderer
from colloid.errors import HookError
from colloid.rollout.client import EngineClient, RequestAborted
from colloid.rollout.conversation import Recordings, use_recordings
from colloid.rollout.options import SamplingOptions
from colloid.rollout.scopes import watch_cuts

GenerateFunction = Callable[..., Awaitable[Any]]
"""A: `(sample, sampling_params, evaluation=…) -> Sample or list of Samples`. B: `(samples, evaluation=…) -> list`."""

CUSTOM_DEADLINE = 1800.0
"""Seconds in which neither the user's generate function nor any request of the run has moved."""


@dataclass
class _Together:
    """The samples that form B is called with."""

    samples: list[Sample]
    task: asyncio.Task | None = None


class CustomGenerate:
    """The user's functions, for the samples of one rollout or one evaluation set.

    Args:
        load: the function of a path.
        end_ids: tokens that end generation, beside the tokenizer's own end token.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Any,
        sampling: SamplingOptions,
        load: Callable[[str], GenerateFunction],
        *,
        rollout_id: int,
        evaluation: bool,
        end_ids: Sequence[int] = (),
    ):
        self._client = client
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._load = load
        self._rollout_id = rollout_id
        self._evaluation = evaluation
        self._end_ids = end_ids
        self._renderers: dict[str, TurnRenderer] = {}
        self._together: dict[tuple[int, str], _Together] = {}

    @contextmanager
    def together(self, samples: list[Sample], path: str | None) -> Iterator[None]:
        """Inside, form B gets all of these samples (those with its path) in one call, whichever comes first."""
        keys = []
        for own in {sample.generate_function_path or path for sample in samples} - {None}:
            shared = _Together([one for one in samples if (one.generate_function_path or path) == own])
            keys += [(id(one), own) for one in shared.samples]
            self._together |= dict.fromkeys([(id(one), own) for one in shared.samples], shared)
        try:
            yield
        finally:
            for key in keys:
                del self._together[key]

    async def one(self, path: str, sample: Sample, params: dict[str, Any]) -> list[Sample]:
        """What the function makes of one sample: it, or the parts that its rollout was split into.

        Raises:
            HookError: it raised, or returned something else.
        """
        function = self._load(path)
        if not takes_groups(function):
            result = await self._call(lambda: function(sample, params, evaluation=self._evaluation), [sample])
            return result[0]
        shared = self._together.get((id(sample), path)) or _Together([sample])
        if shared.task is None:
            call = self._call(lambda: function(shared.samples, evaluation=self._evaluation), shared.samples)
            shared.task = asyncio.ensure_future(call)
        try:
            parts = await asyncio.shield(shared.task)
        except asyncio.CancelledError:
            shared.task.cancel()
            raise
        return parts[next(place for place, one in enumerate(shared.samples) if one is sample)]

    async def _call(self, call: Callable[[], Awaitable[Any]], samples: list[Sample]) -> list[list[Sample]]:
        """Calls the function. The parts of each sample, in order."""
        recordings = Recordings(
            list(samples),
            *(self._client, self._tokenizer, self._sampling, self._renderer),
            rollout_id=self._rollout_id,
            parse=self._forms,
        )
        cuts = watch_cuts() if len(samples) > 1 else []
        try:
            with use_recordings(recordings):
                result = await self._while_progress(call(), f"sample {samples[0].index}")
            if cuts:
                raise RequestAborted(f"requests of the group of sample {samples[0].index} were aborted")
        except BaseException as error:
            recordings.drop(aborted=isinstance(error, RequestAborted))
            raise
        parts = []
        for sample, given in zip(samples, _by_sample(result, samples), strict=True):
            part = recordings.finish(sample, given)
            if len(part) > 1:
                for one in part:
                    one.rollout_id = sample.index if one.rollout_id is None else one.rollout_id
            for one in part:
                _check_custom(one)
            parts.append(part)
        return parts

    def _forms(self, text: str) -> list[dict[str, Any]]:
        template = self._tokenizer.chat_template
        return list(as_messages(text, template_format(template if isinstance(template, str) else None)))

    def _renderer(self, sample: Sample) -> TurnRenderer:
        kwargs = {**self._sampling.apply_chat_template_kwargs, **(sample.apply_chat_template_kwargs or {})}
        key = json.dumps(kwargs, sort_keys=True, default=repr)
        if key not in self._renderers:
            self._renderers[key] = TurnRenderer(self._tokenizer, end_ids=self._end_ids, template_kwargs=kwargs)
        return self._renderers[key]

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
            if task.cancelled():  # by nothing here: whoever cancels this would have ended the wait
                raise HookError(f"{name}: it raised asyncio.CancelledError, or let one pass")
            return task.result()
        finally:
            task.cancel()


def takes_groups(function: Any) -> bool:
    """Whether it is of form B, which takes the samples of a whole group."""
    target = getattr(getattr(function, "hook", None), "target", None)
    if target is None:
        return False
    parameters = list(inspect.signature(target).parameters.values())
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    names = [one.name for one in positional]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return names[1:2] == ["samples"]
    return names[1:2] == ["samples"] or names[2:3] == ["evaluation"] or len(positional) < 3


def share_rewards(samples: list[Sample]) -> None:
    """Branches that a rollout left have the reward of its last one, and fail with it."""
    last = {sample.rollout_id: sample for sample in samples if not is_forked(sample)}
    for sample in samples:
        if is_forked(sample) and sample.reward is None and (graded := last.get(sample.rollout_id)) is not None:
            sample.reward = copy.deepcopy(graded.reward)
            if graded.status is Status.FAILED:
                sample.status = graded.status


def is_forked(sample: Sample) -> bool:
    """Whether it is a branch that its rollout left; nothing grades it."""
    return bool(sample.metadata.get(FORKED))


def _by_sample(result: Any, samples: list[Sample]) -> list[list[Sample]]:
    """What was made of each sample, in order: the sample itself, and those with its index.

    Raises:
        HookError: something else was returned, or nothing for a sample.
    """
    given = result if isinstance(result, list) else [result]
    flat = [one for item in given for one in (item if isinstance(item, list) else [item])]
    if not flat or not all(isinstance(one, Sample) for one in flat):
        what = "a Sample or a list of Samples" if len(samples) == 1 else "the list of the samples"
        raise HookError(f"it must return {what}, and returned {result!r:.200}")
    if len(samples) == 1:
        return [flat]
    parts = [[one for one in flat if one is sample or one.index == sample.index] for sample in samples]
    missing = [sample.index for sample, part in zip(samples, parts, strict=True) if not part]
    if missing or sum(map(len, parts)) != len(flat):
        lacks = f"lacks samples {missing[:8]}" if missing else "has samples of other indices"
        raise HookError(f"it must return all {len(samples)} samples that it was given; what it returned {lacks}")
    return parts


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
