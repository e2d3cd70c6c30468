"""Which of trainer and engines give their memory back while the other works.

With `--colocate` both do: they share device slots, and take turns. Without it neither does, unless it is asked for;
on a machine without CUDA all memory is the host's, so that it can be of use there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from colloid.config.eval_config import has_trainer
from colloid.config.external import OPTION as EXTERNAL
from colloid.config.external import is_external
from colloid.config.sft import serves

if TYPE_CHECKING:
    from colloid.config.args import Args


def resolve_offload(args: Args) -> None:
    """Sets `offload_train` and `offload_rollout`."""
    takes_turns = args.entry == "train" and has_trainer(args) and serves(args)
    wanted = bool(args.offload or args.colocate)
    if args.offload_train is None:
        args.offload_train = wanted and takes_turns
    if args.offload_rollout is None:
        why_not = _engines_keep_memory(args)
        args.offload_rollout = wanted and takes_turns and not why_not
        if wanted and takes_turns and why_not:
            args.warnings.append(f"--offload-rollout is off, as {why_not}")


def _engines_keep_memory(args: Args) -> str | None:
    """Why the run's engines cannot give theirs back."""
    if is_external(args):
        return f"the engines of {EXTERNAL} are not this run's own"
    if args.rollout_engine == "sglang" and args.device == "cpu":
        return "SGLang gives its memory back on CUDA alone"
    return None


def _given(args: Args) -> list[str]:
    """The options that ask for it."""
    return [
        f"--{name.replace('_', '-')}"
        for name in ("offload", "offload_train", "offload_rollout")
        if name in args.given and getattr(args, name)
    ]


def _asynchronous(args: Args) -> str | None:
    given = _given(args)
    if args.entry == "train_async" and given:
        return (
            f"{given[0]}: train_async.py generates while it trains, so that neither trainer nor engines can do without "
            "their memory. Leave it out, or use train.py"
        )
    return None


def _engines(args: Args) -> str | None:
    why_not = _engines_keep_memory(args)
    if args.offload_rollout and why_not:
        return f"--offload-rollout cannot be had: {why_not}. Leave it out; --offload-train works"
    return None


def _alone(args: Args) -> str | None:
    given = _given(args)
    if not given or args.entry != "train" or (has_trainer(args) and serves(args)):
        return None
    who = "engines" if has_trainer(args) else "trainer"
    return f"{given[0]}: this run has no {who} that could use the memory; leave it out"


def memory_line(args: Args) -> str | None:
    """What `--dry-run` says of it."""
    found = []
    if args.offload_train:
        place = "a file of the run" if args.device == "cpu" else "pinned memory of the host"
        found.append(f"the trainer gives its own to {place} while engines generate")
    if args.offload_rollout:
        found.append("the engines give theirs back while the trainer trains")
    return "; ".join(found) or None


RULES: tuple[Callable[[Args], str | None], ...] = (_asynchronous, _engines, _alone)
