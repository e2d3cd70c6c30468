"""Runs with a part left out: only the trainer on saved rollouts, or only the engines."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import count, takewhile

from colloid.config.args import Args
from colloid.errors import ConfigError

Rule = Callable[[Args], "str | None"]

FIELD = "{rollout_id}"


def rollout_file(path: str, rollout_id: int) -> str:
    """The file of a rollout: `path` with its number for `{rollout_id}` (or, say, `{rollout_id:06d}`)."""
    return path.format(rollout_id=rollout_id)


def resolve_debug(args: Args) -> None:
    """Saved rollouts leave nothing to generate; where their number was not given, it is that of the files.

    `--dump-details` names the files that were not named.

    Raises:
        ConfigError: a path cannot be filled in, or there is no file.
    """
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    _resolve_details(args)
    for option in ("load", "save"):
        path = getattr(args, f"{option}_debug_rollout_data")
        if path is not None:
            _check_fields(f"--{option}-debug-rollout-data", path)
    path = args.load_debug_rollout_data
    if path is None:
        return
    if args.num_rollout is None:
        numbered = takewhile(lambda rollout_id: os.path.isfile(rollout_file(path, rollout_id)), count())
        args.num_rollout = sum(1 for _ in numbered) if _names_rollout(path) else 1
        if not args.num_rollout:
            raise ConfigError(_missing(path, 0))


def _resolve_details(args: Args) -> None:
    directory = args.dump_details
    if directory is None:
        return
    root = directory.replace("{", "{{").replace("}", "}}")
    if args.save_debug_rollout_data is None and not args.debug_train_only:
        args.save_debug_rollout_data = f"{root}/rollout_data/{FIELD}.jsonl"
    if args.save_debug_train_data is None and not args.debug_rollout_only:
        args.save_debug_train_data = f"{root}/train_data/{FIELD}_{{rank}}.pt"


def _check_fields(option: str, path: str) -> None:
    try:
        rollout_file(path, 0)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{option} {path}: only {FIELD} may stand in braces ({error})") from error


def _names_rollout(path: str) -> bool:
    return rollout_file(path, 0) != rollout_file(path, 1)


def _missing(path: str, rollout_id: int) -> str:
    file = rollout_file(path, rollout_id)
    return (
        f"--load-debug-rollout-data {path}: there is no such file as {file} for rollout {rollout_id} (looked for "
        f"{os.path.abspath(file)}); --save-debug-rollout-data of another run writes them, from rollout 0 on"
    )


def _left_out(args: Args) -> str | None:
    if args.debug_train_only and args.debug_rollout_only:
        other = "--debug-train-only" if "debug_train_only" in args.given else "--load-debug-rollout-data"
        return f"{other} and --debug-rollout-only exclude each other: nothing would be left to run"
    if args.debug_train_only and args.load_debug_rollout_data is None:
        return f"--debug-train-only needs --load-debug-rollout-data PATH: files of rollouts, {FIELD} for the number"
    if args.debug_train_only and args.save_debug_rollout_data:
        return "--save-debug-rollout-data saves what is generated, and with --load-debug-rollout-data nothing is"
    if args.debug_rollout_only and args.resume_from:
        return f"--debug-rollout-only generates with a Hugging Face model, and --load {args.load} holds checkpoints"
    return None


def _paths(args: Args) -> str | None:
    saved = args.save_debug_rollout_data
    if saved is not None and not _names_rollout(saved):
        return f"--save-debug-rollout-data {saved} needs {FIELD} in it: each rollout would overwrite the one before"
    share = args.load_debug_rollout_data_subsample
    if share is not None and args.load_debug_rollout_data is None:
        return f"--load-debug-rollout-data-subsample {share:g} has no --load-debug-rollout-data to take it of"
    if share == 0:
        return "--load-debug-rollout-data-subsample 0 leaves no sample; it is a share above 0"
    return None


def _files(args: Args) -> str | None:
    path = args.load_debug_rollout_data
    if path is None or args.num_rollout is None:
        return None
    resumed = re.search(r"iter_(\d+)$", str(args.resume_from or ""))
    for rollout_id in range(int(resumed[1]) + 1 if resumed else 0, args.num_rollout):
        if not os.path.isfile(rollout_file(path, rollout_id)):
            return _missing(path, rollout_id)
    return None


RULES: tuple[Rule, ...] = (_left_out, _paths)
RUN_RULES: tuple[Rule, ...] = (_files,)


def warnings(args: Args) -> list[str]:
    """Options that the missing part would have used."""
    found = []
    if args.dump_details is not None and args.save_debug_rollout_data is None and args.save_debug_train_data is None:
        found.append(f"--dump-details {args.dump_details} has no effect: nothing is generated")
    if args.debug_train_only:
        found += _unused(
            args, "--debug-train-only: there are no engines", ("eval_interval", "check_weight_update_equal")
        )
    if args.debug_rollout_only:
        found += _unused(
            args, "--debug-rollout-only: there is no trainer", ("save_interval", "check_weight_update_equal")
        )
    return found


def _unused(args: Args, reason: str, dests: tuple[str, ...]) -> list[str]:
    flags = ["--" + dest.replace("_", "-") for dest in dests if dest in args.given and getattr(args, dest)]
    return [f"{reason}, so {' and '.join(flags)} {'have' if len(flags) > 1 else 'has'} no effect"] if flags else []
