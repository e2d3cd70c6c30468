"""Starts two engines, lists one of them in a file and runs a command that trains on it. While it runs, the second one
is added to the list, and later the first one is taken out of it.

    python -m examples.external_engines.engines MODEL_DIR LIST RUN_DIR python train.py …

Ends with the exit code of the command; the engines end then as well.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from colloid.engines.launch import EngineConfig, launch_engine
from colloid.observe.metrics import read_metrics

ROLLOUTS = 4
"""That are trained with one engine, and then with two, before the list changes."""
OPTIONS = {"max-running-requests": 8}
"""Of an engine: a few requests at once, so that more engines can do more."""


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) < 4:
        sys.exit("usage: python -m examples.external_engines.engines MODEL_DIR LIST RUN_DIR COMMAND …")
    model, listed, run_dir, command = arguments[0], Path(arguments[1]), Path(arguments[2]), arguments[3:]
    key = os.environ.setdefault("COLLOID_API_KEY", secrets.token_urlsafe(24))  # the run finds it there
    config = EngineConfig(model, listed.parent / "engines", key, options=OPTIONS)
    engines = [launch_engine(config, f"engine_{number}", number) for number in range(2)]
    try:
        urls = [engine.wait_until_ready() for engine in engines]
        write_list(listed, urls[:1])
        run = subprocess.Popen(command)
        try:
            if wait_for_rollouts(run, run_dir, 1):
                print(f"adding {urls[1]} to {listed}", flush=True)
                write_list(listed, urls)
            if wait_for_rollouts(run, run_dir, 2):
                print(f"taking {urls[0]} out of {listed}", flush=True)
                write_list(listed, urls[1:])
        finally:
            code = run.wait()
        ended = [engine.how_it_ended() for engine in engines if engine.exit_code is not None]
        if ended:
            sys.exit(f"error: an engine {ended[0]}")
    finally:
        for engine in engines:
            engine.stop()
    sys.exit(code)


def write_list(path: Path, urls: Sequence[str]) -> None:
    """One address a line, all at once: the run may be reading."""
    writing = path.with_name(f"{path.name}.new")
    writing.write_text("".join(url.removeprefix("http://") + "\n" for url in urls))
    writing.replace(path)


def wait_for_rollouts(run: subprocess.Popen, run_dir: Path, engines: int) -> bool:
    """Returns when `ROLLOUTS` were trained with so many engines; False where the run has ended before."""
    while sum(line.get("engine/alive") == engines for line in read_metrics(run_dir)) < ROLLOUTS:
        if run.poll() is not None:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    main()
