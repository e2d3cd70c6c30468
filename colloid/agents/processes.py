"""Agents in processes that can be killed: `AgentProcesses.run` calls a function of the user's in one.

A process is used again by later calls, one at a time. It is killed, with all that it has started, where a call takes
too long or is no longer waited for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from colloid.errors import HookError
from colloid.rewards.pool import GradingFailed, WorkerPool

PROCESSES_PER_CPU = 4
"""At most: agents mostly wait for answers."""


class AgentProcesses:
    """Used from one event loop. Processes start as they are needed.

    Args:
        size: processes at most; None: `PROCESSES_PER_CPU` a CPU, and at least 8.
    """

    def __init__(self, size: int | None = None):
        self._size = size or max(8, PROCESSES_PER_CPU * (os.cpu_count() or 1))
        self._pool: WorkerPool | None = None

    async def run(self, function: Callable[..., Any], args: tuple, keywords: dict[str, Any], timeout: float) -> Any:
        """The JSON result of the function.

        Raises:
            HookError: it cannot be handed to another process, it raised, took too long, or its process ended.
        """
        module, file, name = _place(function)
        try:
            payload = pickle.dumps((args, keywords))
        except Exception as error:  # pickle raises what it likes.
            raise HookError(f"the arguments of {name} cannot be pickled: {type(error).__name__}: {error}") from error
        if self._pool is None:
            self._pool = WorkerPool(self._size)
        target = "colloid.agents.processes:call"
        try:
            return await self._pool.run(target, (module, file, name, payload), timeout, kill_if_cancelled=True)
        except GradingFailed as error:
            told = f"\n{error.traceback}" if error.traceback else ""
            what = str(error).replace(target, "it")
            raise HookError(f"{name} of {file or module}, run in a process of its own: {what}{told}") from error

    async def close(self) -> None:
        """Kills all processes."""
        if self._pool is not None:
            await self._pool.close()
            self._pool = None


def call(module: str, file: str | None, name: str, payload: bytes) -> Any:
    """In the process: calls the function."""
    target: Any = _load(module, file)
    for part in name.split("."):
        target = getattr(target, part)
    args, keywords = pickle.loads(payload)
    return target(*args, **keywords)


def _place(function: Callable[..., Any]) -> tuple[str, str | None, str]:
    """Module, its file, and the name of a function in it."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not module or not name or "<" in name or module == "__main__":
        raise HookError(
            f"{function!r:.120} cannot run in a process of its own: give a function that is defined at the top of a "
            "file, and its arguments beside it"
        )
    return module, getattr(sys.modules.get(module), "__file__", None), name


def _load(name: str, file: str | None) -> ModuleType:
    """The module; of a file that was loaded by its path, under the same name, so that what is pickled finds it."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]) or file is None:
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
