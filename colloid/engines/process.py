"""Child processes that live no longer than their parent, also when that is killed with SIGKILL.

Life of a child: spawned from a thread that lives as long as this process (Linux ties "parent death" to the spawning
thread) -> the child asks the kernel for SIGKILL on its parent's death and checks that the parent is still there ->
serves -> `stop` sends SIGTERM, and SIGKILL after a grace period, to all that it has started in turn as well.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

KILLED_DEADLINE = 10.0
"""Seconds until a process that was killed must have ended."""
_spawner: ThreadPoolExecutor | None = None

# Runs in the child before its program. A parent that died before prctl shows as another parent id.
_PREAMBLE = (
    "import ctypes, os, runpy, sys;"
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9);"  # PR_SET_PDEATHSIG, SIGKILL
    "parent = int(sys.argv[1]);"
    "os.getppid() == parent or os._exit(1);"
    "module = sys.argv[2]; sys.argv = sys.argv[2:];"
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


class ModuleProcess:
    """`python -m module arguments` as a child that dies with this process.

    Args:
        module: dotted name of a module with a `__main__`.
        arguments: its command line.
        log_path: receives its output (appended).
        environment: variables set on top of this process's own.
        python: the interpreter; None: this process's own.
    """

    def __init__(
        self,
        module: str,
        arguments: list[str],
        log_path: Path,
        environment: dict[str, str] | None = None,
        python: str | None = None,
    ):
        global _spawner
        if _spawner is None:
            _spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")
        self.module, self.log_path = module, log_path
        self._stopping = threading.Lock()
        self._reaping = threading.Lock()  # held for a look, never for a wait
        self._is_kept = False
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [python or sys.executable, "-c", _PREAMBLE, str(os.getpid()), module, *arguments]
        self._process = _spawner.submit(self._spawn, command, {**os.environ, **(environment or {})}).result()

    def _spawn(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or `stop` waits for it; -N where signal N ended it."""
        with self._reaping:
            return self._process.returncode if self._is_kept else self._process.poll()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its output, for error messages."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def terminate(self) -> None:
        """Asks it to end. Returns at once."""
        with self._reaping:
            if not self._is_kept:  # else it was asked already
                self._process.terminate()

    def stop(self, grace: float = 5.0) -> None:
        """SIGTERM; SIGKILL after `grace` seconds. Returns when it has ended, and what it started with it. Others may
        ask for its exit code meanwhile, or stop it as well.
        """
        with self._stopping:
            with self._reaping:
                if self._process.poll() is not None:
                    return
                # It is not reaped before its group is killed: so long its id is the group's and nobody else's.
                self._is_kept = True
                os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            with self._reaping:
                os.killpg(self.pid, signal.SIGKILL)
                self._is_kept = False
            try:
                self._process.wait(KILLED_DEADLINE)
            except subprocess.TimeoutExpired:  # those that are to be stopped after it still are
                logger.warning("%s (pid %d) has not ended %g s after SIGKILL", self.module, self.pid, KILLED_DEADLINE)
