"""Runs a command that trains, and kills processes of it on the way: an engine, the router, a trainer rank.

    python -m examples.fault_tolerance.kill RUN_DIR python train.py …

Ends with the exit code of the command. `kills.jsonl` in the run directory says who was killed, and how long it took
until the next rollout was trained.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from colloid.observe.metrics import read_metrics

KILLS = ((1, "engine"), (3, "router"), (5, "trainer rank"))
"""After which rollout, and who."""
KILLS_FILE = "kills.jsonl"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) < 2:
        sys.exit("usage: python -m examples.fault_tolerance.kill RUN_DIR COMMAND …")
    run_dir, command = Path(arguments[0]), arguments[1:]
    run = subprocess.Popen(command)
    try:
        for rollout, who in KILLS:
            if not wait_for_rollout(run, run_dir, rollout):
                break
            victim = find(run.pid, who)
            print(f"killing the {who} (pid {victim.pid}) after rollout {rollout}", flush=True)
            victim.kill()
            killed, last = time.time(), last_rollout(run_dir)
            if wait_for_rollout(run, run_dir, last + 1):
                line = {"who": who, "pid": victim.pid, "after": last, "seconds": time.time() - killed}
                with (run_dir / KILLS_FILE).open("a") as file:
                    file.write(json.dumps(line) + "\n")
    finally:
        code = run.wait()
    sys.exit(code)


def wait_for_rollout(run: subprocess.Popen, run_dir: Path, rollout: int) -> bool:
    """Returns when the metrics of a rollout are written; False where the run has ended before."""
    while last_rollout(run_dir) < rollout:
        if run.poll() is not None:
            return False
        time.sleep(0.02)
    return True


def last_rollout(run_dir: Path) -> int:
    """The last one that has metrics, -1 before the first."""
    return max((record["step"] for record in read_metrics(run_dir)), default=-1)


def find(driver: int, who: str) -> psutil.Process:
    """The first process of the run that is one.

    Raises:
        RuntimeError: there is none.
    """
    for process in psutil.Process(driver).children(recursive=True):
        try:
            name, line = process.name(), " ".join(process.cmdline())
        except psutil.Error:  # it has ended meanwhile
            continue
        if {
            "engine": "colloid.engines.embedded" in line or "sglang.launch_server" in line,
            "router": "router" in name or "_router" in line,
            "trainer rank": name.startswith("ray::TrainWor"),
        }[who]:
            return process
    raise RuntimeError(f"the run has no {who} to kill")


if __name__ == "__main__":
    main()
