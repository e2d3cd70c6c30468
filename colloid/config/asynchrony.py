"""Asynchronous training: how far the rollout may be ahead of the trainer, and how old a trained token may be.

A weight version is one update of the engines; after every `--update-weights-interval` K rollouts comes one. While
rollout r is trained, up to `--async-buffer-size` N rollouts after it are finished or running. So rollout q may start
once rollout q - N is trained upon, and the weights that it starts with are at most ceil((N + K - 1) / K) versions old
when it is trained itself: that is the least, and the default, of `--max-staleness` S.
"""

from __future__ import annotations

from colloid.config.args import Args

CONTINUOUS = "colloid.rollout.continuous.generate_rollout"
"""`--rollout-function-path` of the rollout that never waits for a whole batch."""


def least_staleness(buffer_size: int, interval: int) -> int:
    """ceil((N + K - 1) / K): versions that a token is old at most, if nothing else holds rollouts back."""
    return -(-(buffer_size + interval - 1) // interval)


def updates_between(first: int, last: int, interval: int) -> int:
    """Weight updates after rollout `first` begins to be trained and before rollout `last` does."""
    return last // interval - first // interval


def resolve_async(args: Args) -> None:
    """Sets `max_staleness` of asynchronous training; without it there is no bound."""
    if args.entry == "train_async" and args.max_staleness is None:
        args.max_staleness = least_staleness(args.async_buffer_size, args.update_weights_interval)


def _synchronous(args: Args) -> str | None:
    if args.entry == "train_async":
        return None
    for dest, flag in (("async_buffer_size", "--async-buffer-size"), ("pause_mode", "--pause-mode")):
        if dest in args.given:
            return f"{flag} is for train_async.py: with train.py nothing is generated while it trains or updates"
    if args.rollout_function_path == CONTINUOUS:
        return f"--rollout-function-path {CONTINUOUS} is for train_async.py: it generates while the trainer trains"
    return None


def _asynchronous(args: Args) -> str | None:
    if args.entry != "train_async":
        return None
    if args.colocate:
        return (
            "--colocate: train_async.py generates while it trains, so trainer and engines cannot take turns on the "
            "same devices. Leave it out and give --actor-num-gpus-per-node and --rollout-num-gpus, or use train.py"
        )
    for dest, flag in (("debug_train_only", "--debug-train-only"), ("debug_rollout_only", "--debug-rollout-only")):
        if getattr(args, dest):
            return f"{flag} is for train.py: with one of the two there is nothing to overlap"
    if args.deterministic and args.rollout_function_path == CONTINUOUS:
        return (
            f"--deterministic with --rollout-function-path {CONTINUOUS}: what a batch holds there depends on what "
            "finishes first. Leave the function out: train_async.py --deterministic has a logical clock"
        )
    return None


def _staleness(args: Args) -> str | None:
    if args.entry != "train_async":
        return None
    size, interval = args.async_buffer_size, args.update_weights_interval
    least = least_staleness(size, interval)
    if args.max_staleness < least:
        return (
            f"--max-staleness {args.max_staleness} is less than --async-buffer-size {size} and "
            f"--update-weights-interval {interval} make of it: ceil(({size} + {interval} - 1) / {interval}) = {least}. "
            "Raise it, or lower the buffer's size"
        )
    return None


def _exact_resume(args: Args) -> str | None:
    """Between two updates the engines' weights are not the trainer's, and a checkpoint holds the trainer's alone."""
    interval = args.update_weights_interval
    if not (args.deterministic and args.save and args.save_interval):
        return None
    if args.keep_old_actor and args.entry == "train_async":
        return (
            "--deterministic with --keep-old-actor and --save-interval: a checkpoint holds the newest weights alone, "
            "and rollouts that wait in it are of older ones: a resume would have other old log-probs; leave one out"
        )
    if args.save_interval % interval == 0:
        return None
    return (
        f"--deterministic, and --save-interval {args.save_interval} is not a multiple of --update-weights-interval "
        f"{interval}: a resume from between two weight updates would send the engines newer weights than the run had"
    )


RULES = (_synchronous, _asynchronous, _staleness, _exact_resume)
