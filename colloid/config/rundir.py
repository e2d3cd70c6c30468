"""The run directory: `<outputs-dir>/<run-name>`, or the one that `--load` goes on in."""

from __future__ import annotations

import os
import re
import time

from colloid.config.args import Args
from colloid.config.restart import Restart
from colloid.errors import ConfigError

CHECKPOINTS = "checkpoints"


def resolve_run_directory(args: Args, restart: Restart | None = None) -> None:
    """Sets `run_dir`, `run_name` and `save`. Makes no directory.

    Args:
        restart: the run begins again in the directory that it had.

    Raises:
        ConfigError: the directory holds another run.
    """
    name, load, resume = args.run_name, args.load, args.resume_from
    if name is not None and not re.fullmatch(r"[\w.+=@,-]+", name):
        raise ConfigError(f"--run-name {name!r}: letters, digits and ._+=@,- are allowed")
    goes_on = load is not None and not args.finetune and os.path.basename(os.path.normpath(load)) == CHECKPOINTS
    if restart is not None:
        args.run_dir, args.run_name = restart.run_dir, restart.run_name
    elif name is None and goes_on:
        args.run_dir = os.path.dirname(os.path.normpath(load)) or "."
        args.run_name = os.path.basename(os.path.abspath(args.run_dir))
    else:
        args.run_name = name or _free_name(args.outputs_dir)
        args.run_dir = os.path.join(args.outputs_dir, args.run_name)
    continues = restart is not None or (resume is not None and _within(resume, args.run_dir))
    if os.path.exists(args.run_dir) and not os.path.isdir(args.run_dir):
        raise ConfigError(f"the run directory {args.run_dir} is a file: choose another --run-name")
    if not continues and os.path.isdir(args.run_dir) and os.listdir(args.run_dir):
        checkpoints = os.path.join(args.run_dir, CHECKPOINTS)
        raise ConfigError(
            f"the run directory {args.run_dir} holds a run already: choose another --run-name, remove it, or go on "
            f"with it by --load {checkpoints}"
            + (
                ""
                if os.path.isdir(checkpoints)
                else " (it has no checkpoints yet: it was run without --save-interval, or ended before)"
            )
        )
    if args.save is None and args.save_interval is not None:
        args.save = os.path.join(args.run_dir, CHECKPOINTS)


def _free_name(outputs_dir: str) -> str:
    base = time.strftime("%Y%m%d-%H%M%S")
    name, number = base, 1
    while os.path.exists(os.path.join(outputs_dir, name)):
        number += 1
        name = f"{base}-{number}"
    return name


def _within(path: str, directory: str) -> bool:
    path, directory = os.path.realpath(path), os.path.realpath(directory)
    return os.path.commonpath([path, directory]) == directory


def weights_disk_dir(args: Args) -> str:
    """Where weights are written for the engines."""
    return os.path.abspath(args.update_weight_disk_dir or os.path.join(args.run_dir, "weights"))


def weights_places(args: Args) -> list[str]:
    """The directories that engines may read weights from while the run goes on."""
    if args.update_weight_transport != "disk":
        return []
    local = args.update_weight_local_checkpoint_dir
    return [weights_disk_dir(args), *([os.path.abspath(local)] if local else [])]
