"""The training loops: (evaluate) generate -> train -> save -> sync. Step k of every curve has seen k rollouts.

Synchronous, each rollout is generated with the weights that the rollout before it trained. Asynchronous, rollouts are
generated while the trainer trains on those before them; `colloid/config/asynchrony.py` says how far ahead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colloid.checkpoints import rollouts_trained
from colloid.cluster.run import Run
from colloid.config.asynchrony import updates_between
from colloid.config.eval_config import evaluates, evaluates_only
from colloid.config.sft import takes_conversations
from colloid.config.tracking import events_directory, wandb_options
from colloid.errors import ConfigError
from colloid.observe.logs import setup_logging
from colloid.observe.metrics import STEP_TIME, MetricsWriter, has_logged
from colloid.observe.progress import Progress
from colloid.observe.summary import summary
from colloid.observe.trackers import Tracker, open_trackers

logger = logging.getLogger(__name__)


def train(args: Any) -> None:
    """Synchronous training: each rollout is generated with the weights that the rollout before it trained."""
    if evaluates_only(args):
        return evaluate(args)
    with started(args) as (run, writer, progress):
        log_interrupted(args, run, writer, first_sync(run) if run.trains and run.serves else {})

        for rollout_id in range(run.start_rollout_id, args.num_rollout):
            if evaluation_due(args, rollout_id):
                writer.log(rollout_id, run.evaluate(rollout_id))
            clock = Clock()
            with clock("rollout_time"):
                rollout = run.generate(rollout_id)
            metrics = {}
            if run.trains:
                run.memory.to_training(update_follows=update_is_next(args, rollout_id))
                with clock("train_time"):
                    metrics = run.train(rollout_id, rollout)
            if save_due(args, rollout_id):
                with clock("save_time"):
                    run.save(rollout_id, rollout.metrics | metrics | clock.metrics(rollout.num_tokens))
            if run.trains and run.serves and sync_due(args, rollout_id):
                run.memory.to_update()
                with clock("update_weights_time"):
                    metrics |= run.sync_weights()
            if run.trains and run.serves and engines_are_next(args, rollout_id):
                run.memory.to_rollout()

            metrics = rollout.metrics | metrics | clock.metrics(rollout.num_tokens)
            metrics |= run.memory.metrics() | run.utilization()
            writer.log(rollout_id, metrics)
            progress.update(metrics)


def train_async(args: Any) -> None:
    """Asynchronous training: while rollout r is trained, those up to r + `--async-buffer-size` are being made.

    With `--deterministic` nothing is generated across a weight update or a checkpoint: what was started is finished
    first. So which rollout sees which weights follows from its number alone.
    """
    if evaluates_only(args):
        return evaluate(args)
    with started(args) as (run, writer, progress):
        ahead = RolloutsAhead(run, args)
        log_interrupted(args, run, writer, run.sync_weights() if run.serves else {})

        for rollout_id in range(run.start_rollout_id, args.num_rollout):
            ahead.start(rollout_id)
            if evaluation_due(args, rollout_id):
                writer.log(rollout_id, run.evaluate(rollout_id))
            clock = Clock()
            with clock("rollout_wait_time"):
                rollout = ahead.take(rollout_id)
            with clock("train_time"):
                metrics = run.train(rollout_id, rollout)
            if save_due(args, rollout_id):
                with clock("settle_time"):
                    ahead.settle()
                with clock("save_time"):
                    run.save(rollout_id, rollout.metrics | metrics | clock.metrics(rollout.num_tokens))
            if run.serves and sync_due(args, rollout_id):
                with clock("settle_time"):
                    ahead.settle()
                with clock("update_weights_time"):
                    metrics |= run.sync_weights()

            metrics = rollout.metrics | metrics | clock.metrics(rollout.num_tokens) | run.utilization()
            metrics |= overlap_metrics(metrics)
            writer.log(rollout_id, metrics)
            progress.update(metrics)


def first_sync(run: Run) -> dict[str, float]:
    """The engines get the weights that the run starts with, once the trainer's ranks hold them."""
    run.memory.to_update()
    metrics = run.sync_weights()
    run.memory.to_rollout()
    run.memory.metrics()  # of no step
    return metrics


def log_interrupted(args: Any, run: Run, writer: MetricsWriter, synced: dict[str, float]) -> None:
    """Where the run was stopped after a checkpoint, but before it had logged that rollout, logs it now.

    Args:
        synced: metrics of the weight update that the run has begun with: that which was to follow the checkpoint.
    """
    last = run.start_rollout_id - 1
    if run.saved_metrics and writer.goes_on and not has_logged(args.run_dir, last, STEP_TIME):
        writer.log(last, run.saved_metrics | (synced if sync_due(args, last) else {}))


@contextmanager
def started(args: Any) -> Iterator[tuple[Run, MetricsWriter, Progress]]:
    """A run with what it writes; after its rollouts come the last evaluation, and what a person wants to know."""
    setup_logging(args.run_dir, "driver")
    save_options(args)
    trackers = trackers_of(args)
    with Run(args) as run:
        save_options(args)  # some are settled only once the engines and nodes are known
        start = run.start_rollout_id
        resume_step = start - 1 if args.resume_from or args.num_restarts else None
        with MetricsWriter(args.run_dir, resume_step, trackers, events_directory(args)) as writer:
            note_restart(args, start, writer)
            progress = Progress(args.num_rollout, start)
            yield run, writer, progress
            if evaluates(args):
                writer.log(args.num_rollout, run.evaluate(args.num_rollout))
            progress.close()
    if not (args.debug_train_only or args.debug_rollout_only):  # a part that is left out reads nothing
        report_unread(args, run.options_read)
    print(summary(args.run_dir))


def evaluate(args: Any) -> None:
    """Evaluation alone (`--num-rollout 0`): the given weights once, in a run directory of its own."""
    setup_logging(args.run_dir, "driver")
    save_options(args)
    trackers = trackers_of(args)
    step = rollouts_trained(args.init_checkpoint)
    resume_step = step - 1 if args.num_restarts else None
    with Run(args) as run, MetricsWriter(args.run_dir, resume_step, trackers, events_directory(args)) as writer:
        note_restart(args, step, writer)
        save_options(args)
        if run.trains:
            first_sync(run)
        writer.log(step, run.evaluate(step))
    print(summary(args.run_dir))


def note_restart(args: Any, start: int, writer: MetricsWriter) -> None:
    """Where the run began again after a failure: says so, and has it in the next line of metrics."""
    if args.num_restarts:
        seconds = time.time() - args.failed_at
        logger.info(
            "restart %d: the run goes on with rollout %d, %.0f s after it failed", args.num_restarts, start, seconds
        )
        writer.note({"perf/restarts": args.num_restarts, "perf/restart_time": seconds})


class RolloutsAhead:
    """The rollouts that are being made, or are finished, before the trainer needs them.

    Invariants: at most `--async-buffer-size` rollouts are ahead of the one that is trained. None is started whose
    tokens could be more than `--max-staleness` weight updates old when it is trained.
    """

    def __init__(self, run: Any, args: Any):
        self._run = run
        self._size = args.async_buffer_size
        self._interval = args.update_weights_interval
        self._max_staleness = args.max_staleness
        self._num_rollout = args.num_rollout
        self._deterministic = bool(args.deterministic)
        self._started: dict[int, Any] = {}
        self._next: int | None = None

    def start(self, rollout_id: int) -> None:
        """Starts what may be made now that `rollout_id` is the next to be trained."""
        self._next = rollout_id if self._next is None else self._next
        last = min(rollout_id + self._size, self._num_rollout - 1)
        while self._next <= last and self._staleness(rollout_id, self._next) <= self._max_staleness:
            version = self._run.weight_version + self._staleness(rollout_id, self._next)
            self._started[self._next] = self._run.start_rollout(self._next, version, rollout_id - 1)
            self._next += 1

    def take(self, rollout_id: int) -> Any:
        """The rollout, when it is finished."""
        return self._run.wait_for_rollout(rollout_id, self._started.pop(rollout_id))

    def settle(self) -> None:
        """Deterministic: returns when all that was started is finished."""
        if self._deterministic:
            for rollout_id, reference in self._started.items():
                self._run.wait_for_rollout(rollout_id, reference)

    def _staleness(self, now: int, rollout_id: int) -> int:
        """Weight updates from now, before `now` is trained, until `rollout_id` is."""
        return updates_between(now, rollout_id, self._interval)


def overlap_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """`perf/…` of how well generation and training overlap in a step.

    Efficiency is the longer of the two in relation to the step: 1 where the other and the weight update are hidden.
    The trainer is idle while it waits for its rollout, and with `--deterministic` for those that are to be finished
    before an update.
    """
    step = metrics["perf/step_time"]
    longer = max(metrics.get("perf/rollout_time", 0.0), metrics["perf/train_time"])
    return {
        "perf/overlap_efficiency": min(1.0, longer / step),
        "perf/trainer_idle_ratio": (metrics["perf/rollout_wait_time"] + metrics.get("perf/settle_time", 0.0)) / step,
    }


def save_options(args: Any) -> None:
    """Writes the resolved options to `args.yaml` in the run directory."""
    path = Path(args.run_dir) / "args.yaml"
    try:
        args.write_yaml(path)
    except OSError as error:
        raise ConfigError(
            f"{path} could not be written: {error}. Make room there, or choose another place with --outputs-dir"
        ) from error


def trackers_of(args: Any) -> list[Tracker]:
    """Where metrics go beside the run directory."""
    return open_trackers(wandb_options(args), args.run_dir, resumed=bool(args.resume_from or args.num_restarts))


def evaluation_due(args: Any, rollout_id: int) -> bool:
    """Evaluation comes before rollout 0, before every `--eval-interval`-th where that is given, and after the last."""
    if not evaluates(args):
        return False
    interval = args.eval_interval
    if rollout_id == 0:
        return not args.skip_eval_before_train
    return bool(interval) and rollout_id % interval == 0


def sync_due(args: Any, rollout_id: int) -> bool:
    """Whether the engines get the weights after this rollout: after every `--update-weights-interval`-th and the last.

    In SFT only an evaluation uses them.
    """
    done = rollout_id + 1
    if done == args.num_rollout:
        return True
    if takes_conversations(args):
        return evaluation_due(args, done)
    return done % args.update_weights_interval == 0


def engines_are_next(args: Any, rollout_id: int) -> bool:
    """Whether the engines do something before the trainer trains again. In SFT only after an update do they."""
    return sync_due(args, rollout_id) or not takes_conversations(args)


def update_is_next(args: Any, rollout_id: int) -> bool:
    """Whether what the engines do next, after this rollout is trained, is to take new weights."""
    return sync_due(args, rollout_id) or takes_conversations(args)


def save_due(args: Any, rollout_id: int) -> bool:
    """After every `--save-interval`-th rollout, and after the last."""
    if not (args.save or args.save_hf) or args.debug_rollout_only:
        return False
    done, interval = rollout_id + 1, args.save_interval
    return done == args.num_rollout or bool(interval and done % interval == 0)


class Clock:
    """Where the time of a step goes."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str):
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """`perf/…` of the step; `num_tokens` prompt and response tokens went through training."""
        step = time.perf_counter() - self._start
        metrics = {STEP_TIME: step, **{f"perf/{name}": seconds for name, seconds in self._seconds.items()}}
        if train := self._seconds.get("train_time"):
            metrics |= {"perf/train_tokens_per_sec": num_tokens / train, "perf/wait_time_ratio": (step - train) / step}
        return metrics


def report_unread(args: Any, read_elsewhere: set[str]) -> None:
    """Warns of options that the user set and nothing read."""
    unread = args.unread(read_elsewhere)
    if unread:
        logger.warning("options that were set but never read: %s", ", ".join(unread))
