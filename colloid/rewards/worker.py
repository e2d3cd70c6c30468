"""The worker process of `pool.WorkerPool`: `python -m colloid.rewards.worker`. Runs one function call after another.

Frames on stdin: 4 bytes of length, then a pickle (from the parent, which is trusted). Frames on stdout: 4 bytes of
length, then JSON: what runs here judges text that a model wrote, so the parent unpickles nothing of it. The process
ends with its parent: at the end of stdin, and by a death signal where it hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from typing import Any

SHARED: dict[str, Any] = {}
"""What the parent handed over once, at the start."""

_HEADER = struct.Struct("<I")


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux; elsewhere the end of stdin does)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def resolve(target: str) -> Any:
    """`module:attribute` as an object."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


async def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Calls the task's function; coroutines have the task's time limit, the rest is the parent's to end."""
    answer: dict[str, Any] = {"id": task["id"]}
    begun = time.monotonic()
    try:
        result = resolve(task["target"])(*task["args"])
        if inspect.isawaitable(result):
            result = await asyncio.wait_for(result, task["timeout"])
        answer["result"] = result
        json.dumps(answer)
    except Exception as error:  # The function is anybody's: whatever it raises is told to the parent.
        # It may have limits of its own, and raise the same before this one is reached.
        if isinstance(error, asyncio.TimeoutError) and time.monotonic() - begun >= task["timeout"]:
            return {"id": task["id"], "timeout": True}
        answer = {"id": task["id"], "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return answer


async def serve(reader: asyncio.StreamReader, out) -> None:
    """Runs tasks as they come, several at a time where they are coroutines."""
    running: set[asyncio.Task] = set()

    async def handle(task: dict[str, Any]) -> None:
        send(out, {"id": task["id"], "started": True})
        send(out, await run_task(task))

    while True:
        try:
            (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            task = pickle.loads(await reader.readexactly(length))
        except asyncio.IncompleteReadError:
            return
        job = asyncio.ensure_future(handle(task))
        running.add(job)
        job.add_done_callback(running.discard)


async def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What user code prints must not end up between the frames.
    reader = asyncio.StreamReader(limit=2**30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    setup = pickle.loads(await reader.readexactly(length))
    sys.path[:] = setup["path"]
    ready: dict[str, Any] = {"id": None, "result": None}
    try:
        _shared().update(pickle.loads(setup["shared"]))
    except Exception as error:  # A class of the user's that cannot be imported here, say.
        ready = {"id": None, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    if setup["preload"] is not None and "error" not in ready:
        target, args = setup["preload"]
        ready = await run_task({"id": None, "target": target, "args": args, "timeout": None})
    send(out, ready)
    await serve(reader, out)


def send(out, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    out.write(_HEADER.pack(len(body)) + body)
    out.flush()


def _shared() -> dict[str, Any]:
    """The dict of the importable module: this file runs as `__main__`, which is another one."""
    return importlib.import_module("colloid.rewards.worker").SHARED


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main())
