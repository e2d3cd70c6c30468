"""Checkpoints on disk: written whole or not at all.

    checkpoints/
      latest_checkpointed_iteration.txt     the marker: names the last good one
      iter_0000007/                         after rollout 7
        meta.json  trainer/  rollout/

Writing: everything goes into `.writing_iter_0000007`, is synced to the disk, renamed, and only then the marker moves.
A process killed at any moment leaves the last good checkpoint and, at worst, a `.writing_…` that the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colloid.errors import CheckpointError, ConfigError, written_for_user

MARKER = "latest_checkpointed_iteration.txt"
FORMAT = 1
"""Raised when the layout changes; another one is refused."""


def checkpoint_name(rollout_id: int) -> str:
    return f"iter_{rollout_id:07d}"


def write_checkpoint(root: Path, rollout_id: int, meta: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """Writes the checkpoint of `rollout_id` under `root`.

    Args:
        meta: JSON values kept in `meta.json`; the format and the rollout id are added.
        write: fills the directory that it is given (existing, empty).

    Returns:
        The committed directory.

    Raises:
        CheckpointError: it could not be written (a full disk, say); the last good one is untouched.
    """
    final, writing = root / checkpoint_name(rollout_id), root / f".writing_{checkpoint_name(rollout_id)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".writing_*"):
            shutil.rmtree(leftover)
        writing.mkdir()
        write(writing)
        (writing / "meta.json").write_text(json.dumps({"format": FORMAT, "rollout_id": rollout_id, **meta}, indent=1))
        _sync_tree(writing)
        if final.exists():  # left by a run that went further; never what the marker names, see `check_save_directory`
            shutil.rmtree(final)
        writing.rename(final)
        _write_marker(root, rollout_id)
    except Exception as error:  # Megatron and torch raise whatever they like where a disk is full.
        free = _free_space(root)
        shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of rollout {rollout_id} could not be written to {root}{free}. Free some space there or "
            f"choose another place with --save; {_last_good(root)}. The reason: {written_for_user(error) or error}"
        ) from error
    return final


def check_save_directory(root: Path, resume_from: Path | None) -> None:
    """Raises `ConfigError` where `root` holds the checkpoints of another run, which this one would overwrite."""
    if (root / MARKER).exists() and (resume_from is None or resume_from.parent.resolve() != root.resolve()):
        raise ConfigError(
            f"--save {root} already holds checkpoints of another run: continue that run with --load {root}, or choose "
            "another --save"
        )


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """`meta.json` of a committed checkpoint."""
    path = checkpoint / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; load an earlier checkpoint") from error
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {meta.get('format')}; this version of colloid reads format {FORMAT}")
    return meta


def _free_space(root: Path) -> str:
    """How much room there is, as a remark."""
    try:
        usage = shutil.disk_usage(root)
    except OSError:
        return ""
    return f" ({usage.free / 1e6:.1f} MB of {usage.total / 1e6:.1f} MB were free)"


def _last_good(root: Path) -> str:
    marker = root / MARKER
    if not marker.is_file():
        return "there is no earlier checkpoint"
    return f"the last good one is {root / checkpoint_name(int(marker.read_text()))}"


def _write_marker(root: Path, rollout_id: int) -> None:
    temporary = root / f".{MARKER}"
    with temporary.open("w") as file:
        file.write(str(rollout_id))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(root / MARKER)
    _sync(root)


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
