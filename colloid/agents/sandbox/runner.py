"""The sandbox's process: a supervisor that forks a child, isolates it, runs code in it, and says how it ended.

    python -I -S runner.py STATUS_FD < request.json

Standard library only. The request is `Request` as JSON. To STATUS_FD goes one line of JSON: `{"error": …}` where it
could not be isolated, so that nothing was run; else `{"ended": …, "status": …}`. Its output is that of the code.

The supervisor is not reached by the code: it is outside of its namespaces, or may not be signalled. On SIGTERM, and
when whoever started it dies, it kills the child.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
OUT_OF_MEMORY = 99
"""The status of a child whose code did not catch a MemoryError."""
POLL = 0.02
"""Seconds between looks at the child's threads and files."""
MAX_FILES = 1000
NAME = "<code>"


def main() -> None:
    sys.path.insert(0, HERE)
    import kernel

    status = int(sys.argv[1])
    signals = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    request = json.load(sys.stdin)
    if os.getppid() != request["parent"]:
        return  # It died before it was waited for.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        user_namespace = _before_fork(request)
    except OSError as error:
        _say(status, {"error": str(error)})
        return
    seed = os.getpid()
    child = os.fork()
    if child == 0:
        _in_child(request, status, signals, user_namespace, seed)
        return
    ended, code = supervise(child, signals, request)
    _say(status, {"ended": ended, "status": code})


def _before_fork(request: dict[str, Any]) -> bool:
    import isolation
    import kernel

    if not kernel.supported():
        raise OSError(f"the system calls of {kernel.MACHINE} are not known to the sandbox")
    if request["mechanism"] == "namespaces":
        return isolation.enter_namespaces()
    isolation.landlock_version()
    return False


def _in_child(request: dict[str, Any], status: int, signals: set, user_namespace: bool, seed: int) -> None:
    """Isolates this process, and runs the code in it. Leaves the interpreter as code does."""
    try:
        isolate(request, user_namespace, seed)
    except Exception as error:
        _say(status, {"error": str(error) or repr(error)})
        os._exit(1)
    os.close(status)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    sys.path[:] = [path for path in sys.path if path != HERE] + request["import_paths"]
    for name in ("kernel", "isolation", "seccomp"):
        sys.modules.pop(name, None)
    run_code(request["code"])


def isolate(request: dict[str, Any], user_namespace: bool, seed: int) -> None:
    """Puts all limits over this process. Raises OSError where one of them cannot be had."""
    import isolation
    import kernel
    import seccomp

    os.setsid()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    namespaces = request["mechanism"] == "namespaces"
    if namespaces:
        arguments = {"user_namespace": user_namespace, "uid_seed": seed}
        isolation.enter_root(request["readable"], request["disk"], **arguments)
    else:
        isolation.enter_landlock(request["readable"], request["directory"])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # Setting a user id clears it, so here.
    for limit, value in (
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_CPU, max(1, -int(-request["cpu"] // 1))),
        (resource.RLIMIT_FSIZE, request["disk"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    seccomp.install(attributes=namespaces)


def run_code(code: str) -> None:
    """As `python FILE`, with the file's lines in tracebacks. May raise SystemExit."""
    import types

    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv[:] = [NAME]
    try:
        exec(compile(code, NAME, "exec"), module.__dict__)
    except SystemExit:
        raise
    except MemoryError:
        os.write(2, b"MemoryError\n")
        sys.exit(OUT_OF_MEMORY)
    except BaseException as error:
        import linecache
        import traceback

        linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def supervise(child: int, signals: set, request: dict[str, Any]) -> tuple[str, int | None]:
    """Waits for the child, and kills it where it oversteps; why it ended, and its status (None: killed)."""
    deadline = time.monotonic() + request["timeout"]
    verdict = None
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        received = signal.sigtimedwait(signals, POLL)
        if received is not None and received.si_signo == signal.SIGTERM:
            verdict = verdict or "stopped"
        elif time.monotonic() > deadline:
            verdict = verdict or "timeout"
        elif threads_of(child) > request["threads"]:
            verdict = verdict or "threads"
        elif request["directory"] and _is_full(request["directory"], request["disk"]):
            verdict = verdict or "disk"
        if verdict:
            os.kill(child, signal.SIGKILL)
    if verdict:
        return verdict, None
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        return ("memory", 1) if code == OUT_OF_MEMORY else ("exit", code)
    killed = os.WTERMSIG(status)
    if killed in (signal.SIGKILL, signal.SIGXCPU) and usage.ru_utime + usage.ru_stime > request["cpu"] - 0.5:
        return "cpu", None
    return f"signal {killed}", None


def threads_of(pid: int) -> int:
    """How many a process has; 0 once it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[17])
    except (OSError, IndexError):
        return 0


def _is_full(directory: str, disk: int) -> bool:
    total = 0
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_FILES:
                return True
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total > disk


def _say(status: int, line: dict[str, Any]) -> None:
    os.write(status, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    main()
