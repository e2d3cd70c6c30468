"""The training loop: (evaluate) generate -> train -> save -> sync. Step k of every curve has seen k rollouts."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colloid.cluster.run import Run
from colloid.config.sft import takes_conversations
from colloid.errors import ConfigError
from colloid.observe.logs import setup_logging
from colloid.observe.metrics import MetricsWriter
from colloid.observe.progress import Progress
from colloid.observe.summary import summary

logger = logging.getLogger(__name__)


def train(args: Any) -> None:
    """Synchronous training: each rollout is generated with the weights that the rollout before it trained."""
    setup_logging(args.run_dir, "driver")
    save_options(args)
    with Run(args) as run:
        start = run.start_rollout_id
        writer = MetricsWriter(args.run_dir, resume_step=start - 1 if args.resume_from else None)
        progress = Progress(args.num_rollout, start)
        if run.trains and run.serves:
            run.sync_weights()

        for rollout_id in range(start, args.num_rollout):
            if evaluation_due(args, rollout_id):
                writer.log(rollout_id, run.evaluate(rollout_id))
            clock = Clock()
            with clock("rollout_time"):
                rollout = run.generate(rollout_id)
            metrics = {}
            if run.trains:
                with clock("train_time"):
                    metrics = run.train(rollout_id, rollout)
            if save_due(args, rollout_id):
                with clock("save_time"):
                    run.save(rollout_id)
            if run.trains and run.serves and sync_due(args, rollout_id):
                with clock("update_weights_time"):
                    metrics |= run.sync_weights()

            metrics = rollout.metrics | metrics | clock.metrics(rollout.num_tokens)
            writer.log(rollout_id, metrics)
            progress.update(metrics)

        if evaluates(args):
            writer.log(args.num_rollout, run.evaluate(args.num_rollout))
        progress.close()
        writer.close()
    if not (args.debug_train_only or args.debug_rollout_only):  # a part that is left out reads nothing
        report_unread(args, run.options_read)
    print(summary(args.run_dir))


def save_options(args: Any) -> None:
    """Writes the resolved options to `args.yaml` in the run directory."""
    path = Path(args.run_dir) / "args.yaml"
    try:
        args.write_yaml(path)
    except OSError as error:
        raise ConfigError(
            f"{path} could not be written: {error}. Make room there, or choose another place with --outputs-dir"
        ) from error


def evaluates(args: Any) -> bool:
    """Whether the run evaluates at all."""
    return bool(args.eval_interval and args.eval_prompt_data and not args.debug_train_only)


def evaluation_due(args: Any, rollout_id: int) -> bool:
    """Evaluation comes before rollout 0, and then before every `--eval-interval`-th."""
    if not evaluates(args):
        return False
    return rollout_id % args.eval_interval == 0 and not (rollout_id == 0 and args.skip_eval_before_train)


def sync_due(args: Any, rollout_id: int) -> bool:
    """Whether the engines need the weights after this rollout: in SFT only an evaluation uses them."""
    last = rollout_id + 1 == args.num_rollout
    return not takes_conversations(args) or last or evaluation_due(args, rollout_id + 1)


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
        self._seconds[name] = time.perf_counter() - start

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """`perf/…` of the step; `num_tokens` prompt and response tokens went through training."""
        step = time.perf_counter() - self._start
        metrics = {"perf/step_time": step, **{f"perf/{name}": seconds for name, seconds in self._seconds.items()}}
        if train := self._seconds.get("train_time"):
            metrics |= {"perf/train_tokens_per_sec": num_tokens / train, "perf/wait_time_ratio": (step - train) / step}
        return metrics


def report_unread(args: Any, read_elsewhere: set[str]) -> None:
    """Warns of options that the user set and nothing read."""
    unread = args.unread(read_elsewhere)
    if unread:
        logger.warning("options that were set but never read: %s", ", ".join(unread))
