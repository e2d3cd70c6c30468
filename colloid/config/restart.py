"""`--max-restarts`: what a run that begins again knows of the one that failed, and how its options follow from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colloid.config.args import Args

OF_ANOTHER_START = ("load", "ckpt_step", "finetune", "start_rollout_id")
"""Options that say what a run starts from; one that goes on from a checkpoint of its own does not start so again."""
FOLLOWS_FROM_START = ("hf_checkpoint", "ref_load")
"""Options that, left out, follow from what a run starts from: its model, and its reference."""
NOT_SAVED = {"no_load_optim": "no_save_optim", "no_load_rng": "no_save_rng"}
"""What cannot be loaded where it was not saved."""


@dataclass(frozen=True)
class Restart:
    """A run that begins again, in its run directory."""

    number: int
    """1 for the first."""
    run_dir: str
    run_name: str
    options: dict[str, Any]
    """What is given to it: the user's options, as they were read when the run first began."""
    failed_at: float
    """Seconds since the epoch."""


def options_to_go_on(given: Mapping[str, Any], checkpoints: str, followed: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that goes on from the last of its own checkpoints.

    Args:
        given: the options that it was started with.
        followed: what those of `FOLLOWS_FROM_START` were in it.
    """
    kept = {name: value for name, value in given.items() if name not in (*OF_ANOTHER_START, *NOT_SAVED)}
    for load, save in NOT_SAVED.items():
        if given.get(save):
            kept[load] = True
    if "ref_load" not in given:
        kept.pop("ref_ckpt_step", None)  # of no use so far
    return {**followed, **kept, "load": checkpoints}


def warnings(args: Args) -> list[str]:
    """Restarts that lose more than they must."""
    if not args.max_restarts:
        return []
    if not args.save:
        return ["--max-restarts without --save or --save-interval: a restart begins from the start of the run"]
    if not args.save_interval:
        return ["--max-restarts without --save-interval: a restart begins from the start of the run"]
    lost = [f"--{save.replace('_', '-')}" for save in NOT_SAVED.values() if getattr(args, save)]
    return [f"--max-restarts: {' and '.join(lost)}, so a restarted run is not the same run"] if lost else []
