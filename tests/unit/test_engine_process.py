import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from colloid.engines import sglang
from colloid.engines.launch import EngineConfig, launch_engine
from colloid.engines.process import ModuleProcess
from colloid.errors import EngineError

SLEEPER = "import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(60)\n"


@pytest.fixture
def sleeper(tmp_path, monkeypatch):
    """A module that writes its process id to a file and sleeps."""
    (tmp_path / "colloid_test_sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    return "colloid_test_sleeper"


def _wait_for_file(path: Path) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} lives on")


def test_a_child_dies_when_its_parent_is_killed(tmp_path, sleeper):
    script = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from colloid.engines.process import ModuleProcess
        ModuleProcess({sleeper!r}, [sys.argv[1]], Path(sys.argv[2]))
        time.sleep(60)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "pid"), str(tmp_path / "log")])
    child = _wait_for_file(tmp_path / "pid")
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    _wait_until_gone(child)


def test_stop_ends_a_child_and_its_output_is_kept(tmp_path, sleeper):
    process = ModuleProcess(sleeper, [str(tmp_path / "pid")], tmp_path / "log")
    _wait_for_file(tmp_path / "pid")
    assert process.exit_code is None
    process.stop()
    assert process.exit_code == -signal.SIGTERM
    failing = ModuleProcess("no_such_module_of_ours", [], tmp_path / "log")
    failing._process.wait(20)
    assert failing.exit_code == 1
    assert "no_such_module_of_ours" in failing.log_tail()


def test_stop_ends_what_the_child_has_started_in_turn(tmp_path, sleeper):
    (tmp_path / "colloid_test_parent.py").write_text(
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-m', {sleeper!r}, sys.argv[1]])\n"
        "time.sleep(60)\n"
    )
    process = ModuleProcess("colloid_test_parent", [str(tmp_path / "pid")], tmp_path / "log")
    grandchild = _wait_for_file(tmp_path / "pid")
    process.stop()
    assert process.exit_code == -signal.SIGTERM
    _wait_until_gone(grandchild)


def test_others_may_ask_for_the_exit_code_of_a_process_that_is_stopped_or_stop_it_as_well(tmp_path, sleeper):
    """Whoever asks for it could reap it: its group would not be killed any more, and the caller be told so."""
    for _ in range(6):
        process = ModuleProcess(sleeper, [str(tmp_path / "pid")], tmp_path / "log")
        done, failed = threading.Event(), []

        def ask(process=process, done=done):
            while not done.is_set():
                process.exit_code  # noqa: B018

        def stop(process=process, failed=failed):
            try:
                process.stop()
            except Exception as error:
                failed.append(error)

        asking, stopping = threading.Thread(target=ask), [threading.Thread(target=stop) for _ in range(2)]
        for thread in (asking, *stopping):
            thread.start()
        process.terminate()
        for thread in stopping:
            thread.join(30)
        done.set()
        asking.join(30)
        assert not failed and process.exit_code == -signal.SIGTERM


def test_an_exit_code_can_be_asked_for_all_through_a_grace_period(tmp_path, sleeper):
    (tmp_path / "colloid_test_deaf.py").write_text(
        f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEPER}"
    )
    process = ModuleProcess("colloid_test_deaf", [str(tmp_path / "pid")], tmp_path / "log")
    _wait_for_file(tmp_path / "pid")
    stopping = threading.Thread(target=process.stop, args=(1.0,))
    stopping.start()
    asked = 0
    while stopping.is_alive() and process.exit_code is None:
        asked += 1
        time.sleep(0.02)
    stopping.join(30)
    assert asked > 5 and process.exit_code == -signal.SIGKILL


def test_another_interpreter_can_be_named(tmp_path, sleeper):
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    process = ModuleProcess(sleeper, [str(tmp_path / "pid")], tmp_path / "log", python=str(other))
    assert str(other) in Path(f"/proc/{_wait_for_file(tmp_path / 'pid')}/cmdline").read_text()
    process.stop()


def test_a_server_that_ends_early_is_said_to_without_its_key_and_the_keys_file_goes(tmp_path, monkeypatch):
    (tmp_path / "colloid_test_server.py").write_text(
        "import pathlib, sys\nprint(pathlib.Path(sys.argv[2]).read_text())\nsys.exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    monkeypatch.setattr(sglang, "MODULE", "colloid_test_server")
    config = EngineConfig("model", tmp_path / "logs", "a-secret", kind="sglang")
    with pytest.raises(EngineError, match=r'ended with 3 before it served; the end of its log.*\n.*api-key: "\*\*\*"'):
        launch_engine(config, "engine").wait_until_ready()
    assert [path.name for path in config.log_dir.iterdir()] == ["engine.log"]
    assert "a-secret" not in repr(config)
