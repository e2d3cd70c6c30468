"""Checkpoints on disk: written whole or not at all.

    checkpoints/
      latest_checkpointed_iteration.txt     the marker: names the last good one
      iter_0000007/                         after rollout 7; `release` where a model was converted
        meta.json  trainer/  rollout/     and critic/ where there is one

Writing: everything goes into `.writing_iter_0000007`, is synced to the disk, renamed, and only then the marker moves.
A process killed at any moment leaves the last good checkpoint and, at worst, a `.writing_…` that the next save removes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colloid.errors import CheckpointError, ConfigError, DeadlineExceeded, ProcessDied, written_for_user

logger = logging.getLogger(__name__)

MARKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What the marker names instead of a rollout, and the directory, where a model was converted."""
CHECKSUMS_FILE = "checksums.json"
"""The last file of a trainer's part."""
FAILED_FILE = "failed.txt"
"""There instead where it could not be written in the background: the reason."""
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
    with _named_errors(root, rollout_id):
        write(_begin(root, checkpoint_name(rollout_id)))
        return _commit(root, rollout_id, meta)


def check_release_directory(root: Path) -> None:
    """Raises `ConfigError` where `root` holds checkpoints, which a converted model would hide."""
    if (root / MARKER).exists():
        raise ConfigError(
            f"{root} already holds checkpoints ({MARKER}): choose another directory for the converted model"
        )


def begin_release(root: Path) -> Path:
    """An empty directory for the model that a converter writes; `commit_release` gives it its name."""
    return _begin(root, RELEASE)


def commit_release(root: Path) -> Path:
    """Commits what was begun, and lets the marker name it."""
    writing = root / f".writing_{RELEASE}"
    _sync_tree(writing)
    final = writing.rename(root / RELEASE)
    _write_marker(root, RELEASE)
    return final


class BackgroundCheckpoint:
    """A checkpoint that is committed in a thread, once what writes it is done. Arguments as of `write_checkpoint`.

    Args:
        begin: starts to fill the directory that it is given.
        finish: returns when the directory is filled, or raises.

    Raises:
        CheckpointError: it could not be begun.
    """

    def __init__(
        self,
        root: Path,
        rollout_id: int,
        meta: dict[str, Any],
        begin: Callable[[Path], None],
        finish: Callable[[Path], None],
    ):
        with _named_errors(root, rollout_id):
            writing = _begin(root, checkpoint_name(rollout_id))
            begin(writing)
        self._error: CheckpointError | None = None

        def run() -> None:
            try:
                with _named_errors(root, rollout_id):
                    finish(writing)
                    _commit(root, rollout_id, meta)
            except CheckpointError as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the checkpoint is committed.

        Raises:
            CheckpointError: it could not be written.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def settle(self, deadline: float) -> None:
        """The run has failed: what only has to be committed still is, within `deadline` seconds."""
        self._thread.join(deadline)
        if self._error is not None:
            logger.warning("%s", self._error)


def wait_written(trainer: Path, deadline: float, interval: float = 0.1) -> None:
    """Returns when a trainer's part that is written in the background is whole.

    A trainer that died is noticed earlier than by the deadline: by the driver's next call to it.

    Args:
        deadline: seconds.
        interval: seconds between two looks.

    Raises:
        CheckpointError: it could not be written, or not in time.
    """
    end = time.monotonic() + deadline
    while not (trainer / CHECKSUMS_FILE).exists():
        if (trainer / FAILED_FILE).exists():
            raise CheckpointError((trainer / FAILED_FILE).read_text())
        if time.monotonic() > end:
            raise CheckpointError(f"the trainer ranks did not finish writing {trainer} within {deadline:g} s")
        time.sleep(interval)


def _begin(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".writing_*"):
        shutil.rmtree(leftover)
    writing = root / f".writing_{name}"
    writing.mkdir()
    return writing


def _commit(root: Path, rollout_id: int, meta: dict[str, Any]) -> Path:
    final, writing = root / checkpoint_name(rollout_id), _writing(root, rollout_id)
    (writing / "meta.json").write_text(json.dumps({"format": FORMAT, "rollout_id": rollout_id, **meta}, indent=1))
    _sync_tree(writing)
    if final.exists():  # left by a run that went further; never what the marker names, see `check_save_directory`
        shutil.rmtree(final)
    writing.rename(final)
    _write_marker(root, str(rollout_id))
    return final


def _writing(root: Path, rollout_id: int) -> Path:
    return root / f".writing_{checkpoint_name(rollout_id)}"


@contextmanager
def _named_errors(root: Path, rollout_id: int) -> Iterator[None]:
    """Whatever goes wrong inside becomes a `CheckpointError`, and what was half written is removed.

    But that a process has died, or does not answer, has nothing to do with the place: that error stays what it is.
    """
    try:
        yield
    except (ProcessDied, DeadlineExceeded):
        shutil.rmtree(_writing(root, rollout_id), ignore_errors=True)
        raise
    except Exception as error:  # Megatron and torch raise whatever they like where a disk is full.
        free = _free_space(root)
        shutil.rmtree(_writing(root, rollout_id), ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of rollout {rollout_id} could not be written to {root}{free}. Free some space there or "
            f"choose another place with --save; {_last_good(root)}. The reason: {written_for_user(error) or error}"
        ) from error


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


def rollouts_trained(weights: str | Path) -> int:
    """How many rollouts a run had trained when it wrote these weights; 0 where they are of no run's checkpoint.

    Args:
        weights: the model's files, as in `iter_0000007/trainer`.
    """
    checkpoint = Path(weights).parent
    return read_meta(checkpoint)["rollout_id"] + 1 if (checkpoint / "meta.json").is_file() else 0


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


def _write_marker(root: Path, text: str) -> None:
    temporary = root / f".{MARKER}"
    with temporary.open("w") as file:
        file.write(text)
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
