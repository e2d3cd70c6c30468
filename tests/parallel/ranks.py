"""Runs a function on several trainer ranks: real processes, gloo, a hard time limit.

Importing Megatron takes seconds, so it is done once, in a server that the ranks are forked from. A spawn should hold
many cases nevertheless; a case returns what the tests assert on.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["colloid.training.actor", "colloid.training.critic", "colloid.engines.embedded.__main__"])


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
    ranks = [
        FORKS.Process(target=_rank, args=(case, directory, rank, world_size, logs[rank])) for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + timeout
    try:
        # One that failed leaves the others waiting.
        while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} took more than {timeout} s")
            time.sleep(0.05)
        if any(rank.exitcode for rank in ranks):
            time.sleep(1)
            raise RuntimeError(f"{name}: exit codes {[rank.exitcode for rank in ranks]}")
    except (TimeoutError, RuntimeError) as error:
        output = "\n".join(f"--- rank {row}\n{log.read_text(errors='replace')[-4000:]}" for row, log in enumerate(logs))
        raise AssertionError(f"{error}\n{output}") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return [pickle.loads((directory / f"result_{rank}").read_bytes()) for rank in range(world_size)]


def print_to(log: Path) -> None:
    """What this process prints goes to `log`."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)


def _rank(case: Callable[..., Any], directory: Path, rank: int, world_size: int, log: Path) -> None:
    """In a process of its own."""
    print_to(log)
    import torch

    torch.set_num_threads(1)
    inputs = pickle.loads((directory / "inputs").read_bytes())
    result = case(rank, world_size, f"file://{directory}/rendezvous", **inputs)
    (directory / f"result_{rank}").write_bytes(pickle.dumps(result))
