"""The rollout manager: data source in, scheduled training batches out. A plain class; Ray wraps it at the top.

    source ──► rollout function ──► groups ──► shaped rewards ──► columns ──► one RankBatch a data-parallel rank

What can be wrong with data and rewards is found in the constructor, before any engine starts.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from colloid import slime_imports
from colloid.config.asynchrony import CONTINUOUS
from colloid.config.debug import rollout_file
from colloid.config.sampling import DEFAULT_ROLLOUT_FUNCTION
from colloid.config.served_models import TEACHER, added_teacher, has_teacher_engine, listed_teacher, policy_model
from colloid.config.sft import serves
from colloid.data.groups import Group, flatten
from colloid.data.mixture import Mixture
from colloid.data.prompts import load_tokenizer
from colloid.data.rows import PromptDataset
from colloid.data.sample import Sample
from colloid.data.sft import end_token_ids
from colloid.data.source import RolloutDataSource
from colloid.data.stream import PromptStream
from colloid.errors import CheckpointError, HookError
from colloid.rollout.batching import RolloutResult, rewarded, rollout_batch, rollout_result
from colloid.rollout.client import EngineClient
from colloid.rollout.context import RolloutContext, use_context
from colloid.rollout.engine_pool import NO_ENGINE_DEADLINE
from colloid.rollout.evaluate import evaluation_metrics, evaluation_output, file_name, make_graders, scores_text
from colloid.rollout.grading import Grader
from colloid.rollout.log_hooks import LogHooks
from colloid.rollout.metrics import multi_turn_metrics, rollout_metrics, warn_of_failures, warn_of_useless_rewards
from colloid.rollout.model_urls import set_model_urls
from colloid.rollout.record import save_rollout, write_samples
from colloid.rollout.reward_setup import grader_options
from colloid.rollout.runner import check_not_all_failed
from colloid.rollout.scores import rollout_scores
from colloid.rollout.setup import (
    load_eval_function,
    load_eval_sets,
    load_rollout_function,
    make_data_source,
    resolve_rm_type,
)
from colloid.rollout.source_calls import check_groups, mark_consumed
from colloid.rollout.staleness import Versions, is_stale, staleness_metrics
from colloid.rollout.teacher import Teacher, check_same_tokenizer, make_teacher
from colloid.rollout.types import RolloutFnTrainOutput
from colloid.rollout.waiting import WaitingRollouts

logger = logging.getLogger(__name__)

STATE_FILE = "rollout.json"
BUILT_IN = (None, DEFAULT_ROLLOUT_FUNCTION, CONTINUOUS)
"""Rollout functions (`--rollout-function-path`) whose running samples are known."""


class RolloutManager:
    """Owns the data source, the HTTP client and the graders.

    Args:
        args: the run's options.

    Raises:
        ConfigError, DataError, HookError: data, reward or hooks cannot be used.
    """

    def __init__(self, args: Any):
        self._args = args
        if args.slime_imports:
            slime_imports.install()
        self._tokenizer = load_tokenizer(args.hf_checkpoint)
        self._source = make_data_source(args)
        self._eval_sets = load_eval_sets(args, self._tokenizer)
        self._rollout_function, self._eval_function = load_rollout_function(args), load_eval_function(args)
        self._log_hooks = LogHooks(args)
        rm_type = resolve_rm_type(args, getattr(self._source, "dataset", None), self._eval_sets)
        self._grader_options = grader_options(args, rm_type)
        teacher = listed_teacher(args) or added_teacher(args)
        if has_teacher_engine(args) and teacher is not None and teacher.model_path is not None:
            check_same_tokenizer(teacher.model_path, self._tokenizer)
        self._context: RolloutContext | None = None
        self._teacher: Teacher | None = None
        self._versions = Versions(max_staleness=args.max_staleness, interval=args.update_weights_interval)
        self._waiting = WaitingRollouts()
        self._turn = asyncio.Condition()
        self._making: set[asyncio.Task] = set()
        self._last_ended: int | None = None
        self._made_any = False
        self._last_end: float | None = None

    def dataset_length(self) -> int:
        """Prompts in the training data set: after the filters, or where it is streamed, before.

        0 where the number of rollouts does not depend on it: to count what is streamed, all of it must be read.
        """
        streamed = isinstance(self._dataset(), (PromptStream, Mixture))
        return 0 if streamed and self._args.num_rollout is not None else len(self._source)

    async def start(
        self,
        router_url: str,
        engine_urls: list[str],
        api_key: str | None = None,
        *,
        frozen: Mapping[str, EngineClient] = MappingProxyType({}),
        examine: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Connects to the engines, which serve already.

        Args:
            frozen: a client of each other model of the run, by name.
            examine: see `EngineClient`.

        Raises:
            ConfigError, EngineError: see `Teacher.check`.
        """
        model = policy_model(self._args)
        policy = model.name
        routers = {policy: router_url} | {name: client.router_url for name, client in frozen.items()}
        set_model_urls(self._args, policy, routers, api_key)
        connections = self._args.sglang_server_concurrency * max(1, len(engine_urls))
        client = EngineClient(
            *(router_url, engine_urls),
            api_key=api_key,
            max_connections=connections,
            no_engine_deadline=NO_ENGINE_DEADLINE,
            through_router=model.disaggregated,
            examine=examine,
        )
        grader = Grader(**self._grader_options)
        end_ids = end_token_ids(self._args.hf_checkpoint, self._args.hf_config)
        loop = asyncio.get_running_loop()
        self._context = RolloutContext(
            *(self._args, client, self._tokenizer, grader, self._eval_sets),
            eval_graders=make_graders(self._eval_sets, self._grader_options),
            end_ids=end_ids,
            loop=loop,
            versions=self._versions,
            policy=policy,
            frozen_clients=frozen,
        )
        if has_teacher_engine(self._args):
            self._teacher = make_teacher(self._args, frozen.get(TEACHER), connections)
            await self._teacher.check(self._tokenizer)

    async def generate(
        self,
        rollout_id: int,
        weight_version: int | None = None,
        *,
        trained: int | None = None,
        after: int | None = None,
    ) -> RolloutResult:
        """One rollout's training batches. Several may be asked for at once: they are made one after another.

        Args:
            weight_version: the one that the engines hold when this rollout is trained.
            trained: the last rollout that has been trained. None: the one before this.
            after: the rollout that is made before this one; its call may come later. None: there is none.

        Raises:
            HookError: a hook cannot be used, or all samples failed.
            EngineError, DeadlineExceeded: see `EngineClient.generate`.
        """
        self._waiting.forget(rollout_id - 1 if trained is None else trained)
        making = asyncio.current_task()
        self._making.add(making)
        try:
            async with self._turn:
                await self._turn.wait_for(lambda: after is None or after == self._last_ended)
                try:
                    return await self._next_rollout(rollout_id, weight_version)
                finally:
                    self._last_ended = rollout_id
                    self._turn.notify_all()
        finally:
            self._making.discard(making)

    async def _next_rollout(self, rollout_id: int, weight_version: int | None) -> RolloutResult:
        started = time.monotonic()
        idle = None if self._last_end is None else started - self._last_end
        self._versions.trained, self._versions.rollout_id = weight_version, rollout_id
        if isinstance(self._source, RolloutDataSource):
            # Resumed from between two updates, it is trained with newer weights than it would have been.
            self._source.hand_out_again(self._waiting.take_stale(rollout_id, self._versions.oldest))
        output = self._waiting.get(rollout_id) or await self._output(rollout_id)
        samples = [sample for group in output.samples for sample in flatten(group)]
        if self._args.save_debug_rollout_data:
            path = rollout_file(self._args.save_debug_rollout_data, rollout_id)
            await asyncio.to_thread(save_rollout, path, samples)
        warn_of_failures(samples, rollout_id)
        check_not_all_failed(samples, f"rollout {rollout_id}")
        batch = await asyncio.to_thread(rollout_batch, self._args, samples)
        if rewarded(self._args) and not self._args.use_opd:
            warn_of_useless_rewards(samples, batch, rollout_id)
        rows = batch.sample_ids.tolist() == [sample.index for sample in samples]  # a hook may make other ones
        shaped = batch.rewards.tolist() if rows else None
        await self._record(f"{rollout_id:06d}", samples, shaped)
        result = await asyncio.to_thread(rollout_result, self._args, samples, batch)
        self._last_end = time.monotonic()
        metrics = rollout_metrics(
            samples,
            batch,
            seconds=self._last_end - started,
            weight_version=weight_version,
            rewarded=rewarded(self._args),
        )
        metrics |= staleness_metrics(batch, weight_version)
        if idle is not None:
            metrics["perf/rollout_idle_ratio"] = idle / (idle + self._last_end - started)
        if self._args.log_multi_turn:
            metrics |= multi_turn_metrics(samples, batch)
        metrics |= rollout_scores(self._args, samples, batch)
        seconds = self._last_end - started
        metrics = await self._log_hooks.rollout(rollout_id, samples, output.metrics or {}, seconds, metrics)
        return replace(result, metrics=metrics)

    async def _output(self, rollout_id: int) -> RolloutFnTrainOutput:
        """What the rollout function returns, checked; it waits to be trained."""
        self._source.rollout_id, self._made_any = rollout_id, True
        output = await self._call(self._rollout_function, rollout_id, self._source, evaluation=False)
        if isinstance(output, list):
            output = RolloutFnTrainOutput(output)
        if not isinstance(output, RolloutFnTrainOutput):
            raise HookError(
                f"--rollout-function-path {self._args.rollout_function_path} must return a RolloutFnTrainOutput or a "
                f"list of groups, and returned {type(output).__name__}"
            )
        check_groups(output.samples, f"--rollout-function-path {self._args.rollout_function_path}")
        self._remove_stale(output.samples, rollout_id)
        if self._teacher is not None:
            samples = [sample for group in output.samples for sample in flatten(group)]
            of_teacher = await self._teacher.judge(samples, self._context.grader.mark_failed)
            output.metrics = {**of_teacher, **(output.metrics or {})}
        output.metrics = {**(output.metrics or {}), **self._data_metrics()}
        self._waiting.add(rollout_id, output)
        mark_consumed(self._source, output.samples)
        return output

    def _remove_stale(self, groups: list[Group], rollout_id: int) -> None:
        """What is too old is not trained. Only a rollout function of the user's can return such samples."""
        stale = [sample for group in groups for sample in flatten(group) if is_stale([sample], self._versions.oldest)]
        for sample in stale:
            sample.remove_sample = True
        if stale:
            logger.warning(
                "rollout %d: %d samples have tokens older than --max-staleness %s allows (weight version %s is the "
                "oldest now): they are not trained. The first is sample %s",
                *(rollout_id, len(stale), self._versions.max_staleness, self._versions.oldest, stale[0].index),
            )

    @property
    def client(self) -> EngineClient:
        """That of the policy's engines; valid after `start`."""
        return self._context.client

    async def hold_requests(self, *, drain: bool) -> None:
        """Before a weight update: see `EngineClient.hold`."""
        if self._context is not None:
            await self._context.client.hold(drain=drain)

    def release_requests(self, weight_version: int) -> None:
        """After it: the engines hold `weight_version`."""
        self._versions.engines = weight_version
        if self._context is not None:
            self._context.client.release()
            with use_context(self._context):
                for kept in self._context.kept.values():
                    if hasattr(kept, "weights_updated"):
                        kept.weights_updated()

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Metrics of all evaluation sets; training's data source is not touched."""
        if not self._eval_sets and self._eval_function is None:
            return {}
        started = time.monotonic()
        function = self._eval_function or self._rollout_function
        output = await self._call(function, rollout_id, self._source, evaluation=True)
        output = evaluation_output(output, getattr(function, "name", "the default rollout function"))
        for name, values in output.data.items():
            await self._record(f"eval_{file_name(name)}_{rollout_id:06d}", values.get("samples") or [])
        metrics = evaluation_metrics(output.data, self._args.log_reward_category)
        logger.info("evaluation before rollout %d: %s", rollout_id, scores_text(metrics))
        metrics = await self._log_hooks.evaluation(rollout_id, output.data, output.metrics or {}, metrics)
        return {**metrics, "perf/eval_time": time.monotonic() - started}

    @asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """Inside, `save` also takes what running samples have, where `--partial-rollout` lets them go on from there.

        That of a generate or rollout function of the user's may be half written, and is not taken.
        """
        args, source = self._args, self._source
        own = args.custom_generate_function_path or args.rollout_function_path not in BUILT_IN
        if self._context is None or own or not args.partial_rollout or not isinstance(source, RolloutDataSource):
            yield
            return
        async with self._context.client.interrupted():
            source.saves_running = True
            try:
                yield
            finally:
                source.saves_running = False

    def save(self, directory: str | Path, rollout_id: int) -> None:
        """Writes the data source's state, as of the end of the training on `rollout_id`, into `directory`.

        Rollouts after it that are finished are saved as they are; what is being generated is handed out again, see
        `interrupted`.
        """
        self._waiting.forget(rollout_id)
        self._waiting.save(directory)
        self._source.checkpoint_dir = str(directory)
        self._source.save(rollout_id)
        write_state(directory, rollout_id)

    def load(self, directory: str | Path, rollout_id: int) -> None:
        """The inverse of `save`."""
        check_state(directory, rollout_id)
        self._source.checkpoint_dir = str(directory)
        self._source.load(rollout_id)
        self._waiting.load(directory)

    async def close(self) -> None:
        """Ends rollouts that are being made, the client, the graders, the teacher's client, and what reads data."""
        making = [task for task in self._making if task is not asyncio.current_task()]
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        if isinstance(self._dataset(), (PromptStream, Mixture)):
            self._dataset().close()
        if self._teacher is not None:
            await self._teacher.close()
        if not self._made_any:  # A resumed run whose rollouts were finished already had nothing to read options for.
            self._args.mark_read(*self._args.given)
        if self._context is not None:
            for kept in self._context.kept.values():
                await kept.close()
            for client in (self._context.client, *self._context.frozen_clients.values()):
                await client.close()
            for grader in {self._context.grader, *self._context.eval_graders.values()}:
                await grader.close()
            self._context = None

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a rollout function; a synchronous one in a thread of its own, as it may run an event loop itself."""
        if self._context is None and serves(self._args):
            raise RuntimeError("RolloutManager.start was not called")
        with use_context(self._context) if self._context else nullcontext():
            if getattr(function, "is_async", inspect.iscoroutinefunction(function)):
                return await function(*args, **kwargs)
            result = await asyncio.to_thread(function, *args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    async def _record(self, name: str, samples: list[Sample], shaped_rewards: list[float] | None = None) -> None:
        if self._args.save_rollouts:
            path = Path(self._args.run_dir, "rollouts", f"{name}.parquet")
            await asyncio.to_thread(write_samples, path, samples, shaped_rewards)

    def _dataset(self) -> Any:
        return getattr(self._source, "dataset", None)

    def _data_metrics(self) -> dict[str, float]:
        dataset = self._dataset()
        return dataset.metrics() if isinstance(dataset, (PromptDataset, PromptStream, Mixture)) else {}


def write_state(directory: str | Path, rollout_id: int) -> None:
    """Writes which rollout a checkpoint is of, into `directory`."""
    Path(directory, STATE_FILE).write_text(json.dumps({"rollout_id": rollout_id}))


def check_state(directory: str | Path, rollout_id: int) -> None:
    """
    Raises:
        CheckpointError: `directory` is not the rollout's part of the checkpoint of `rollout_id`.
    """
    path = Path(directory, STATE_FILE)
    if not path.exists():
        raise CheckpointError(f"{directory} has no {STATE_FILE}: it is not a checkpoint's rollout state")
    saved = json.loads(path.read_text())["rollout_id"]
    if saved != rollout_id:
        raise CheckpointError(f"{path} is of rollout {saved}, and rollout {rollout_id} is resumed")
