"""Options of profiles and recordings of memory: what follows from them, and rules between them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

from colloid.config.args import Args

Rule = Callable[[Args], "str | None"]

OVERALL = "train_overall"


@dataclass(frozen=True)
class ProfileOptions:
    """What the ranks of the trainer record.

    Attributes:
        ranks: those that record anything.
        rollouts: which are profiled; empty: none.
        targets: what of them: `train_overall` or parts of it.
        recorder: of memory: `torch`, `memray`, or none.
        memory_rollouts: after how many the recording of memory ends; None: with the run.
    """

    ranks: frozenset[int]
    rollouts: range
    targets: frozenset[str]
    profile_dir: str
    recorder: str | None
    memory_dir: str
    memory_rollouts: int | None


def profile_options(args: Args) -> ProfileOptions:
    """Of the trainer's ranks."""
    return ProfileOptions(
        ranks=frozenset(args.profile_ranks),
        rollouts=range(args.profile_step_start, args.profile_step_end) if args.use_pytorch_profiler else range(0),
        targets=frozenset(args.profile_target),
        profile_dir=os.path.join(args.run_dir, "profiles"),
        recorder=args.memory_recorder if args.record_memory_history else None,
        memory_dir=args.memory_snapshot_dir or os.path.join(args.run_dir, "memory"),
        memory_rollouts=args.memory_snapshot_num_steps,
    )


def _profile(args: Args) -> str | None:
    if args.profile and not args.use_pytorch_profiler:
        return (
            "--profile alone marks steps for Nsight Systems, which is not built: add --use-pytorch-profiler, which "
            "writes traces of its own"
        )
    if not args.use_pytorch_profiler:
        return _needs(args, ("profile_step_start", "profile_step_end", "profile_target"), "--use-pytorch-profiler")
    first, end = args.profile_step_start, args.profile_step_end
    if first >= end:
        return f"--profile-step-start {first} and --profile-step-end {end} leave no rollout: the end is not included"
    if OVERALL in args.profile_target and len(set(args.profile_target)) > 1:
        return f"--profile-target {' '.join(args.profile_target)}: {OVERALL} has the other parts in it; name it alone"
    return None


def _memory(args: Args) -> str | None:
    if not args.record_memory_history:
        return _needs(
            args,
            ("memory_recorder", "memory_snapshot_dir", "memory_snapshot_num_steps"),
            "--record-memory-history",
        )
    if args.memory_recorder == "torch" and args.device == "cpu":
        return (
            "--record-memory-history: --memory-recorder torch records what CUDA's allocator does; on a CPU take "
            "--memory-recorder memray, or --use-pytorch-profiler, whose traces show the memory of tensors"
        )
    return None


def _ranks(args: Args) -> str | None:
    if not (args.use_pytorch_profiler or args.record_memory_history):
        return _needs(args, ("profile_ranks",), "--use-pytorch-profiler or --record-memory-history")
    missing = [rank for rank in args.profile_ranks if rank >= args.world_size]
    if missing:
        return f"--profile-ranks {missing[0]}: the trainer has the ranks 0 to {args.world_size - 1}"
    return None


def _needs(args: Args, dests: tuple[str, ...], what: str) -> str | None:
    given = [f"--{dest.replace('_', '-')}" for dest in dests if dest in args.given]
    return f"{', '.join(given)}: nothing is recorded without {what}" if given else None


def _installed(args: Args) -> str | None:
    recorded = args.record_memory_history and args.memory_recorder == "memray"
    if recorded and importlib.util.find_spec("memray") is None:
        return "--memory-recorder memray: it is not installed; pip install 'colloid[memray]'"
    return None


RULES: tuple[Rule, ...] = (_profile, _memory, _ranks)
RUN_RULES: tuple[Rule, ...] = (_installed,)


def warnings(args: Args) -> list[str]:
    """What is allowed, but probably not meant."""
    recording = args.use_pytorch_profiler or args.record_memory_history
    if recording and (args.debug_rollout_only or args.num_rollout == 0):
        return ["nothing is profiled or recorded: there is no trainer"]
    if args.use_pytorch_profiler and args.num_rollout is not None and args.profile_step_start >= args.num_rollout:
        return [
            f"nothing is profiled: --profile-step-start {args.profile_step_start} is not among the "
            f"{args.num_rollout} rollouts of the run"
        ]
    return []
