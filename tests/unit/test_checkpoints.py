import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from colloid import checkpoints
from colloid.checkpoints import BackgroundCheckpoint, check_save_directory, read_meta, wait_written, write_checkpoint
from colloid.errors import CheckpointError, ConfigError


def _fill(value: str):
    return lambda directory: (directory / "data").write_text(value)


def test_a_checkpoint_is_committed_with_its_meta_and_the_marker(tmp_path):
    path = write_checkpoint(tmp_path, 7, {"weight_version": 8}, _fill("seven"))
    assert path == tmp_path / "iter_0000007"
    assert (path / "data").read_text() == "seven"
    assert read_meta(path)["weight_version"] == 8
    assert (tmp_path / checkpoints.MARKER).read_text() == "7"


def test_a_failed_write_leaves_the_last_good_checkpoint_and_nothing_else(tmp_path):
    write_checkpoint(tmp_path, 1, {}, _fill("one"))

    def full_disk(directory: Path) -> None:
        (directory / "data").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"MB were free.*--save.*iter_0000001.*No space left on device"):
        write_checkpoint(tmp_path, 2, {}, full_disk)
    assert (tmp_path / checkpoints.MARKER).read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", checkpoints.MARKER]


def test_a_kill_during_a_save_leaves_the_last_good_checkpoint(tmp_path):
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from colloid.checkpoints import write_checkpoint
        root = Path(sys.argv[1])
        write_checkpoint(root, 1, {}, lambda d: (d / "data").write_text("one"))
        def die(directory):
            (directory / "data").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
        write_checkpoint(root, 2, {}, die)
        """
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, env={**os.environ})
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / checkpoints.MARKER).read_text() == "1"
    assert (tmp_path / "iter_0000001" / "data").read_text() == "one"
    write_checkpoint(tmp_path, 2, {}, _fill("two"))
    assert not list(tmp_path.glob(".writing_*"))
    assert (tmp_path / checkpoints.MARKER).read_text() == "2"


def test_another_runs_checkpoints_are_not_overwritten(tmp_path):
    path = write_checkpoint(tmp_path, 1, {}, _fill("one"))
    with pytest.raises(ConfigError, match="--load"):
        check_save_directory(tmp_path, None)
    check_save_directory(tmp_path, path)
    check_save_directory(tmp_path / "empty", None)


def test_an_unknown_format_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, 1, {}, _fill("one"))
    (path / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        read_meta(path)


def test_a_failed_run_commits_what_is_written_and_does_not_wait_for_what_never_will_be(tmp_path):
    written = threading.Event()

    def finish(directory: Path) -> None:
        assert written.wait(60)

    saving = BackgroundCheckpoint(tmp_path, 3, {}, lambda directory: None, finish)
    saving.settle(0.05)
    assert not (tmp_path / checkpoints.MARKER).exists()
    written.set()
    saving.settle(60)
    assert (tmp_path / checkpoints.MARKER).read_text() == "3"


def test_a_checkpoint_in_the_background_is_committed_when_its_trainer_is_done(tmp_path):
    def begin(directory: Path) -> None:
        (directory / "trainer").mkdir()
        (directory / "trainer" / "data").write_text("begun")

    def finish(directory: Path) -> None:
        wait_written(directory / "trainer", 60, interval=0.01)

    saving = BackgroundCheckpoint(tmp_path, 3, {"weight_version": 4}, begin, finish)
    assert not (tmp_path / checkpoints.MARKER).exists()
    (tmp_path / ".writing_iter_0000003" / "trainer" / checkpoints.CHECKSUMS_FILE).write_text("{}")
    saving.wait()
    assert (tmp_path / checkpoints.MARKER).read_text() == "3"
    assert (tmp_path / "iter_0000003" / "trainer" / "data").read_text() == "begun"
    assert read_meta(tmp_path / "iter_0000003")["weight_version"] == 4

    def fail(directory: Path) -> None:
        begin(directory)
        (directory / "trainer" / checkpoints.FAILED_FILE).write_text("rank 1: No space left on device")

    saving = BackgroundCheckpoint(tmp_path, 4, {}, fail, finish)
    with pytest.raises(CheckpointError, match=r"rollout 4 .*iter_0000003.*rank 1: No space left on device"):
        saving.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", checkpoints.MARKER]
