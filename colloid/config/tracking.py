"""Options of Weights & Biases and TensorBoard: what follows from them, and rules between them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from colloid.config.args import Args

Rule = Callable[[Args], "str | None"]

PROJECT = "colloid"
TENSORBOARD = "tensorboard"
_OPTIONS = ("mode", "dir", "key", "host", "team", "group", "project", "run_id", "always_use_train_step")


@dataclass(frozen=True)
class WandbOptions:
    """How a run is logged to Weights & Biases. None: as its environment variables and settings say."""

    project: str
    run_name: str
    mode: str | None = None
    group: str | None = None
    random_suffix: bool = True
    team: str | None = None
    run_id: str | None = None
    directory: str | None = None
    host: str | None = None
    key: str | None = field(default=None, repr=False)
    steps_per_rollout: int = 1
    always_use_train_step: bool = False
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    """The run's options, without secrets."""


def wandb_options(args: Args) -> WandbOptions | None:
    """None: the run is not logged there."""
    options = WandbOptions(
        project=args.wandb_project or PROJECT,
        run_name=args.run_name,
        mode=args.wandb_mode,
        group=args.wandb_group,
        random_suffix=args.wandb_random_suffix,
        team=args.wandb_team,
        run_id=args.wandb_run_id,
        directory=args.wandb_dir,
        host=args.wandb_host,
        key=args.wandb_key,
        steps_per_rollout=args.num_steps_per_rollout,
        always_use_train_step=bool(args.wandb_always_use_train_step),
        config=args.plain(),
    )
    return options if args.use_wandb and args.wandb_mode != "disabled" else None


def events_directory(args: Args) -> str:
    """Where TensorBoard's events go."""
    project, experiment = args.tb_project_name, args.tb_experiment_name
    if project is None and experiment is None:
        return args.run_dir
    return os.path.join(args.outputs_dir, TENSORBOARD, project or PROJECT, experiment or args.run_name)


def _names(args: Args) -> str | None:
    for option in ("tb_project_name", "tb_experiment_name"):
        name = getattr(args, option)
        if name is not None and (name in ("", ".", "..") or "/" in name):
            return f"--{option.replace('_', '-')} {name!r} is to be the name of a directory, not a path"
    return None


def _installed(args: Args) -> str | None:
    if args.use_wandb and args.wandb_mode != "disabled" and importlib.util.find_spec("wandb") is None:
        return (
            "--use-wandb needs the package wandb, which is not installed: pip install wandb (or colloid[wandb]); "
            "metrics.jsonl and TensorBoard events are written without it"
        )
    return None


RULES: tuple[Rule, ...] = (_names,)
RUN_RULES: tuple[Rule, ...] = (_installed,)


def warnings(args: Args) -> list[str]:
    """Options without an effect."""
    found = [f"--wandb-{name.replace('_', '-')}" for name in _OPTIONS if f"wandb_{name}" in args.given]
    if args.use_wandb or not found:
        return []
    return [f"{', '.join(found)}: no effect without --use-wandb"]
