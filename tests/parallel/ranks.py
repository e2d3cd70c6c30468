"""Runs a function on several trainer ranks: real processes, gloo, a hard time limit.

Importing Megatron takes seconds, so a spawn should hold many cases; a case returns what the tests assert on.
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(
    case: Callable[..., Any], world_size: int, directory: Path, timeout: float = 400.0, **inputs: Any
) -> list:
    """`case(rank, world_size, init_method, **inputs)` on each rank; returns what each rank returned.

    Args:
        case: a function at the top of a module.
        directory: empty, for the rendezvous and the results.
        timeout: seconds; then all ranks are killed, and the test fails with their output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "inputs").write_bytes(pickle.dumps(inputs))
    name = f"{case.__module__}:{case.__name__}"
    logs = [directory / f"log_{rank}" for rank in range(world_size)]
    ranks = []
    for rank in range(world_size):
        command = [sys.executable, "-m", "tests.parallel.ranks", name, str(directory), str(rank), str(world_size)]
        with logs[rank].open("wb") as log:
            ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + timeout
    try:
        # One that failed leaves the others waiting.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} took more than {timeout} s")
            time.sleep(0.05)
        if any(rank.poll() for rank in ranks):
            time.sleep(1)
            raise RuntimeError(f"{name}: exit codes {[rank.poll() for rank in ranks]}")
    except (TimeoutError, RuntimeError) as error:
        output = "\n".join(f"--- rank {row}\n{log.read_text(errors='replace')[-4000:]}" for row, log in enumerate(logs))
        raise AssertionError(f"{error}\n{output}") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [pickle.loads((directory / f"result_{rank}").read_bytes()) for rank in range(world_size)]


def main() -> None:
    name, place, rank, world_size = sys.argv[1:]
    directory = Path(place)
    import torch

    torch.set_num_threads(1)
    module, _, function = name.partition(":")
    inputs = pickle.loads((directory / "inputs").read_bytes())
    case = getattr(importlib.import_module(module), function)
    result = case(int(rank), int(world_size), f"file://{directory}/rendezvous", **inputs)
    (directory / f"result_{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
