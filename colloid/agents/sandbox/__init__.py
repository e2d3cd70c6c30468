"""A sandbox for Python code that a model wrote: `await run_python(code)`.

Each run is a process of its own: without network, without files beyond an empty directory and the interpreter
(read-only), without other processes, with limits on time, CPU, memory, threads, files and output, in an environment
of its own. At any limit it is killed, whole. What keeps it in is the strongest mechanism that the host allows
(`MECHANISMS`, in `isolation.py`), always with a filter of system calls (`seccomp.py`); where the host allows none,
nothing is run (`SandboxError`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colloid.errors import ColloidError

MECHANISMS = ("namespaces", "landlock")
"""Strongest first."""
RUNNER = Path(__file__).with_name("runner.py")
GRACE = 10.0
"""Seconds beyond its timeout after which a run's supervisor is killed too; it should have ended by itself."""
END_TIMEOUT = 2.0
"""Seconds that a supervisor has to end once it is told to, and again once it is killed."""
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # Else each thread takes 64 MB of the address space.
    "PATH": "/nonexistent",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/etc/localtime")


class SandboxError(ColloidError, RuntimeError):
    """Code could not be isolated, so it was not run. Says what each mechanism failed at."""


@dataclass(frozen=True)
class Limits:
    """Of one run.

    Attributes:
        timeout: seconds, from its start.
        cpu: seconds of all its threads; None: as many as `timeout`.
        memory: bytes of its address space, in which the interpreter has about 30 MB.
        disk: bytes of its files.
        output: bytes of stdout, and as many of stderr.
        threads: at once.
        import_paths: directories that it can read and import from beside the standard library. Started by root, the
            code runs as another user, so they are to be readable by all.
    """

    timeout: float = 5.0
    cpu: float | None = None
    memory: int = 512 * 2**20
    disk: int = 32 * 2**20
    output: int = 64 * 2**10
    threads: int = 16
    import_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class SandboxResult:
    """What became of a run.

    Attributes:
        stdout, stderr: up to the limit on output.
        ended: `exit`, or the limit that it was killed at (`timeout`, `cpu`, `memory`, `threads`, `disk`, `output`), or
            `signal N`. `memory` is also a MemoryError that the code did not catch.
        status: the exit status; None where it was killed.
    """

    stdout: str
    stderr: str
    ended: str
    status: int | None

    @property
    def ok(self) -> bool:
        """Whether it came to its end without an error."""
        return self.ended == "exit" and self.status == 0


class Sandbox:
    """Runs code, a bounded number at a time; more wait. Of one event loop.

    Args:
        max_concurrent: runs at once; None: twice the CPUs.
        mechanism: one of `MECHANISMS`; None: the strongest that works here.
    """

    def __init__(self, max_concurrent: int | None = None, mechanism: str | None = None):
        if mechanism is not None and mechanism not in MECHANISMS:
            raise SandboxError(f"no sandbox is called {mechanism!r}; there are {', '.join(MECHANISMS)}")
        self._slots = asyncio.Semaphore(max_concurrent or 2 * (os.cpu_count() or 1))
        self._mechanism = mechanism

    async def run(self, code: str, limits: Limits | None = None) -> SandboxResult:
        """Runs code as the main module.

        Raises:
            SandboxError: it could not be isolated, and was not run.
        """
        mechanism = self._mechanism or await available_mechanism()
        async with self._slots:
            return await _run(code, limits or Limits(), mechanism)


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = weakref.WeakKeyDictionary()


async def run_python(code: str, **limits: Any) -> SandboxResult:
    """Runs code in the sandbox that the event loop's callers share.

    Args:
        **limits: those of `Limits`.

    Raises:
        SandboxError: it could not be isolated, and was not run.
    """
    sandbox = _SHARED.setdefault(asyncio.get_running_loop(), Sandbox())
    return await sandbox.run(code, Limits(**limits))


_available: str | None = None


async def available_mechanism() -> str:
    """The strongest mechanism that works on this host, found by trying it.

    Raises:
        SandboxError: none does.
    """
    global _available
    if _available is None:
        reasons = []
        for name in MECHANISMS:
            try:
                result = await _run("print(6 * 7)", Limits(), name)
            except SandboxError as error:
                reasons.append(str(error))
                continue
            if result.stdout == "42\n":
                _available = name
                break
            reasons.append(f"{name}: ended with {result.ended} (status {result.status}): {result.stderr.strip()}")
        else:
            raise SandboxError(
                f"this host isolates no code, so none is run: {'; '.join(reasons)}. Allow unprivileged user "
                "namespaces, or use a kernel with Landlock (Linux 5.13)"
            )
    return _available


async def _run(code: str, limits: Limits, mechanism: str) -> SandboxResult:
    with ExitStack() as stack:
        directory = None
        if mechanism == "landlock":
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True))
        request = {
            "code": code,
            "mechanism": mechanism,
            "directory": directory,
            "readable": [*_interpreter(), *limits.import_paths],
            "import_paths": list(limits.import_paths),
            "parent": os.getpid(),
            "timeout": limits.timeout,
            "cpu": limits.timeout if limits.cpu is None else limits.cpu,
            "memory": limits.memory,
            "disk": limits.disk,
            "threads": limits.threads,
        }
        reader, writer = os.pipe()
        stack.callback(os.close, reader)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(RUNNER), str(writer)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=ENVIRONMENT | {"TMPDIR": directory or "/tmp"},
                cwd="/",
                pass_fds=(writer,),
            )
        finally:
            os.close(writer)
        try:
            outputs, flooded = await _communicate(process, json.dumps(request).encode(), limits)
        finally:
            await _end(process)
        said = os.read(reader, 1 << 16).decode()
    if not said:
        raise SandboxError(f"{mechanism}: its supervisor ended with status {process.returncode}: {outputs[1]}")
    verdict = json.loads(said.splitlines()[0])
    if "error" in verdict:
        raise SandboxError(f"{mechanism}: {verdict['error']}")
    ended = "output" if flooded else verdict["ended"]
    return SandboxResult(*outputs, ended, None if flooded else verdict["status"])


async def _communicate(process: Any, request: bytes, limits: Limits) -> tuple[tuple[str, str], bool]:
    """Hands the request over, and reads both outputs to their ends; and whether one of them was too long."""
    flooded = False

    async def read(stream: asyncio.StreamReader) -> str:
        nonlocal flooded
        data = bytearray()
        while part := await stream.read(1 << 16):
            data += part
            if len(data) > limits.output and not flooded:
                flooded = True
                _signal(process, process.terminate)
            del data[limits.output :]
        return data.decode(errors="replace")

    async def write() -> None:
        try:
            process.stdin.write(request)
            await process.stdin.drain()
        except ConnectionError:
            pass  # It ended before it was asked; its status says why.
        process.stdin.close()

    try:
        tasks = asyncio.gather(write(), read(process.stdout), read(process.stderr), process.wait())
        _, stdout, stderr, _ = await asyncio.wait_for(tasks, limits.timeout + GRACE)
    except asyncio.TimeoutError:
        raise SandboxError(f"a supervisor did not end within {limits.timeout + GRACE:.0f} s; it is killed") from None
    return (stdout, stderr), flooded


async def _end(process: Any) -> None:
    """Where it did not end by itself (this task was cancelled, say): its child is killed, then it is."""
    if process.returncode is None:
        _signal(process, process.terminate)
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT)
        except asyncio.TimeoutError:
            _signal(process, process.kill)
            await asyncio.wait_for(process.wait(), END_TIMEOUT)


def _signal(process: Any, send: Any) -> None:
    with suppress(ProcessLookupError):  # It may have ended just now.
        send()


def _interpreter() -> Sequence[str]:
    """What a Python process reads: its standard library and shared libraries, and nobody's packages."""
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_config_var("LIBDIR"), *_LIBRARIES]
    return [path for path in paths if path]
