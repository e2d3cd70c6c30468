"""The sandbox holds what code of a model may try, with each mechanism that this host allows."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from colloid.agents import sandbox
from colloid.agents.sandbox import MECHANISMS, Limits, Sandbox, SandboxError, run_python

pytestmark = pytest.mark.timeout(60)
SECONDS = 20.0
"""Of the runs that shall not end at this limit; generous, since other tests run beside."""


def _works(mechanism):
    try:
        return asyncio.run(Sandbox(mechanism=mechanism).run("print(1)", Limits(timeout=SECONDS))).stdout == "1\n"
    except SandboxError:
        return False


HERE = [name for name in MECHANISMS if _works(name)]


def test_this_host_has_a_mechanism():
    assert HERE
    assert asyncio.run(sandbox.available_mechanism()) == HERE[0]


@pytest.fixture(params=HERE)
def run(request):
    """Runs code with each mechanism that works here."""

    def run(code, **limits):
        limits = Limits(**{"timeout": SECONDS, **limits})
        return asyncio.run(Sandbox(mechanism=request.param).run(code, limits))

    run.mechanism = request.param
    return run


ORDINARY = """
import asyncio, collections, datetime, decimal, fractions, itertools, json, math, random, re, statistics, sys, threading
with open("notes.txt", "w") as file:
    file.write("kept")
found = []
thread = threading.Thread(target=lambda: found.append(open("notes.txt").read()))
thread.start(); thread.join()
asyncio.run(asyncio.sleep(0))
print(json.dumps([math.comb(10, 3), str(fractions.Fraction(1, 3) + 1), found, __name__]))
print("beside", file=sys.stderr)
"""


def test_ordinary_code_works(run):
    result = run(ORDINARY)
    assert (result.stdout, result.stderr) == ('[120, "4/3", ["kept"], "__main__"]\n', "beside\n")
    assert result.ok and (result.ended, result.status) == ("exit", 0)


def test_an_error_is_shown_as_python_shows_it(run):
    result = run("def f(x):\n    return 1 / x\n\nprint('first')\nf(0)\n")
    assert result.stdout == "first\n" and (result.ended, result.status, result.ok) == ("exit", 1, False)
    assert '  File "<code>", line 2, in f\n    return 1 / x' in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n") and "runner" not in result.stderr
    assert "SyntaxError" in run("print(").stderr
    assert run("raise SystemExit(7)").status == 7


def test_fork_bombs_do_not_go_off(run):
    forks = "import os\ntry:\n    while True: os.fork()\nexcept OSError as error: print(type(error).__name__)"
    assert run(forks).stdout == "PermissionError\n"
    assert "PermissionError" in run("import subprocess\nsubprocess.run(['/bin/true'])").stderr
    threads = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()"
    assert run(threads).ended == "threads"


def test_endless_loops_end(run):
    assert run("while True: pass", timeout=0.5).ended == "timeout"
    assert run("import time; time.sleep(1000)", timeout=0.5).ended == "timeout"
    stubborn = "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
    assert run(stubborn + "while True: pass", timeout=0.5).ended == "timeout"
    assert run("while True: pass", cpu=1).ended == "cpu"
    assert run("10 ** 10 ** 10", timeout=0.5).ended == "timeout"


def test_memory_is_bounded(run):
    result = run("x = bytearray(10 * 2**30)\nprint(len(x))")
    assert (result.ended, result.status, result.stdout) == ("memory", 1, "")
    assert run("x = []\nwhile True: x.append(bytearray(2**20))").ended == "memory"
    assert (
        run("import mmap\ntry: mmap.mmap(-1, 10 * 2**30)\nexcept (OSError, MemoryError): print('no')").stdout == "no\n"
    )


def test_no_file_is_read_or_written_outside(run, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("token")
    beside = Path(tempfile.mkdtemp()) / "x"
    for path in (secret, beside, __file__, "/etc/passwd", "/proc/1/environ", "/root/x", "/usr/lib/x", "/dev/shm/x"):
        for mode in ("r", "a"):
            result = run(f"open({str(path)!r}, {mode!r}).write('x')")
            assert result.status == 1 and ("FileNotFound" in result.stderr or "Errno" in result.stderr), (path, mode)
    code = f"""
import os
for function, *arguments in ((os.unlink,), (os.chmod, 0o777), (os.truncate, 0)):
    try: function({str(secret)!r}, *arguments); print("done")
    except OSError: print("no")
"""
    assert run(code).stdout == "no\n" * 3
    assert secret.read_text() == "token" and secret.stat().st_mode & 0o777 == 0o644 and not beside.exists()
    beside.parent.rmdir()
    assert "Errno" in run("import os\nopen(os.__file__, 'a')").stderr, "the interpreter is read-only"


def test_runs_share_no_files(run):
    assert run("open('left.txt', 'w').write('x')").ok
    assert run("import os; print(os.listdir('.'), os.listdir(os.environ['TMPDIR']))").stdout == "[] []\n"


def test_files_are_bounded(run):
    result = run("open('a', 'wb').write(bytes(2**24))", disk=2**20)
    assert result.status == 1 and ("File too large" in result.stderr or "No space" in result.stderr)
    many = "import time\nfor n in range(10**6):\n    open(str(n), 'wb').write(bytes(2**18))\n    time.sleep(0.001)"
    result = run(many, disk=2**20)
    assert result.ended == "disk" or "No space" in result.stderr


def test_there_is_no_network(run):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        for call in (f"create_connection(('127.0.0.1', {port}), 2)", "create_connection(('1.1.1.1', 53), 2)"):
            result = run(f"import socket\nsocket.{call}")
            assert result.status == 1 and "PermissionError" in result.stderr
        for kind in ("AF_INET, socket.SOCK_DGRAM", "AF_UNIX", "AF_INET6", "AF_NETLINK, socket.SOCK_RAW"):
            assert "PermissionError" in run(f"import socket\nsocket.socket(socket.{kind})").stderr
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_floods_of_output_are_cut(run):
    result = run("while True: print('x' * 1000)", output=10_000)
    assert (result.ended, result.status, len(result.stdout)) == ("output", None, 10_000)
    result = run("import os\nwhile True: os.write(2, b'y' * 1000)", output=5000)
    assert (result.ended, len(result.stderr), result.stdout) == ("output", 5000, "")


def test_no_other_process_is_reached(run):
    code = f"""
import ctypes, fcntl, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
def attempt(f, *args):
    try: return f(*args)
    except OSError: return "refused"
for pid in {{os.getppid(), {os.getpid()}, -1}} - {{0}}:
    print(attempt(os.kill, pid, signal.SIGTERM))
print(attempt(resource.prlimit, {os.getpid()}, resource.RLIMIT_NOFILE, (1, 1)))
print(attempt(os.setpriority, os.PRIO_PROCESS, {os.getpid()}, 19))
print(attempt(fcntl.fcntl, 0, fcntl.F_SETOWN, {os.getpid()}))
print(libc.ptrace(16, {os.getpid()}, 0, 0), libc.prctl(1, 0, 0, 0, 0), libc.unshare(0x10000000))
"""
    result = run(code)
    assert result.ok, result.stderr
    assert set(result.stdout.split()) == {"refused", "-1"}


def test_the_environment_holds_no_secrets(run, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")
    code = (
        "import os\nprint(dict(os.environ))\ntry: print(open('/proc/self/environ').read())\nexcept OSError: print('no')"
    )
    result = run(code)
    assert result.ok and "hunter2" not in result.stdout and "API_TOKEN" not in result.stdout
    assert "HOME" in result.stdout
    assert (
        run("import os\nfor n in range(3, 64):\n    try: os.fstat(n); print(n)\n    except OSError: pass").stdout == ""
    )


def test_packages_can_be_made_readable(run, tmp_path):
    (tmp_path / "helper.py").write_text("ANSWER = 42\n")
    tmp_path.chmod(0o755)
    assert "ModuleNotFoundError" in run("import helper").stderr
    assert run("import helper; print(helper.ANSWER)", import_paths=(str(tmp_path),)).stdout == "42\n"


def _processes(text):
    """Ids of processes with a text in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_what_is_cancelled_is_gone(run):
    async def cancel():
        box = Sandbox(mechanism=run.mechanism)
        task = asyncio.create_task(box.run("while True: pass", Limits(timeout=50)))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await box.run("print('next')", Limits(timeout=SECONDS))

    before = set(_processes("runner.py"))
    assert asyncio.run(cancel()).stdout == "next\n"
    assert set(_processes("runner.py")) <= before


def test_nothing_outlives_a_caller_that_is_killed(run):
    script = f"""
import asyncio
from colloid.agents.sandbox import Limits, Sandbox
async def main():
    box = Sandbox(mechanism={run.mechanism!r})
    task = asyncio.create_task(box.run("import time\\nwhile True: time.sleep(1)", Limits(timeout=50)))
    await asyncio.sleep(1)
    print("runs", flush=True)
    await task
asyncio.run(main())
"""
    before = set(_processes("runner.py"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "runs\n"
    started = set(_processes("runner.py")) - before
    process.kill()
    process.wait(20)
    deadline = time.monotonic() + 20
    while started & set(_processes("runner.py")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started and not started & set(_processes("runner.py"))


def test_many_run_at_a_time_and_no_more_than_allowed(run):
    async def many():
        box, running, most = Sandbox(3, run.mechanism), 0, 0
        original = sandbox._run

        async def counted(*args):
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            try:
                return await original(*args)
            finally:
                running -= 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sandbox, "_run", counted)
            results = await asyncio.gather(*(box.run(f"print({n})", Limits(timeout=SECONDS)) for n in range(12)))
        return [result.stdout for result in results], most

    assert asyncio.run(many()) == ([f"{n}\n" for n in range(12)], 3)


def test_where_nothing_isolates_nothing_is_run(monkeypatch, tmp_path):
    runner = tmp_path / "runner.py"
    runner.write_text(
        'import os, sys\nos.write(int(sys.argv[1]), b\'{"error": "unshare: Operation not permitted"}\')\n'
    )
    monkeypatch.setattr(sandbox, "RUNNER", runner)
    monkeypatch.setattr(sandbox, "_available", None)
    with pytest.raises(SandboxError, match="isolates no code.*namespaces: unshare: Operation.*landlock.*Allow"):
        asyncio.run(run_python("print(1)"))
    with pytest.raises(SandboxError, match="'chroot'; there are namespaces, landlock"):
        Sandbox(mechanism="chroot")


AS_USER = """
import asyncio, os
from colloid.agents.sandbox import Limits, Sandbox, SandboxError, MECHANISMS
async def main():
    assert os.getuid() == 65534
    for name in MECHANISMS:
        box, limits = Sandbox(mechanism=name), Limits(timeout=20)
        try:
            print(name, (await box.run("print(6 * 7)", limits)).stdout.strip())
        except SandboxError as error:
            print(name, "cannot be had:", error)
            continue
        code = f"import os\\ntry: os.kill({os.getpid()}, 9)\\nexcept OSError: print('refused')"
        assert (await box.run(code, limits)).stdout == "refused\\n"
        assert "Errno" in (await box.run(f"open({__file__!r})", limits)).stderr
        assert "PermissionError" in (await box.run("import socket; socket.socket()", limits)).stderr
asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests are of an ordinary user already")
def test_an_ordinary_user_has_it_too():
    root = Path(sandbox.__file__).parents[3]
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _readable(path)), None)
    if python is None:
        pytest.skip("no interpreter that an ordinary user can run")
    directory = Path(tempfile.mkdtemp())
    try:
        directory.chmod(0o755)
        for name in ("errors.py", "agents/__init__.py", "agents/sandbox"):
            target = directory / "colloid" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = root / "colloid" / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        (directory / "main.py").write_text(AS_USER)
        ended = subprocess.run(
            [python, "main.py"],
            **{"cwd": directory, "env": {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}},
            **{"user": 65534, "group": 65534, "extra_groups": [], "timeout": 50, "capture_output": True, "text": True},
        )
    finally:
        shutil.rmtree(directory)
    assert ended.returncode == 0, ended.stderr
    assert " 42\n" in ended.stdout


def _readable(path):
    command = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
    try:
        return subprocess.run(command, user=65534, group=65534, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_one_for_each_machine(machine, monkeypatch):
    monkeypatch.syspath_prepend(str(sandbox.RUNNER.parent))
    import seccomp

    for attributes in (True, False):
        program = seccomp.instructions(attributes=attributes, machine=machine, pid=7)
        assert len(program) < 4096
        for at, (code, if_true, if_false, operand) in enumerate(program):
            assert at + 1 + max(if_true, if_false) < len(program) or code == 0x06
            assert max(if_true, if_false) < 256 and 0 <= operand < 2**32
    numbers = [
        number for pair in (seccomp.DENIED | seccomp.ATTRIBUTES).values() if (number := pair[machine != "x86_64"])
    ]
    assert len(numbers) == len(set(numbers)) and max(numbers) <= seccomp.NEWEST_KNOWN
