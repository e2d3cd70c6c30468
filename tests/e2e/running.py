"""Runs `train.py` as a user does, in a process of its own, with a tiny model and data made on the spot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMING = ("perf/", "engine/", "router/")
"""Metrics that may differ between two runs that are the same: times, and what was replaced."""


@dataclass(frozen=True)
class Ended:
    """A finished process."""

    code: int
    output: str


def write_sums(path: Path, count: int, *, messages: bool = False) -> Path:
    """Rows like `{"prompt": "What is 7 + 8?", "label": "15"}`; with `messages` the prompt is a conversation."""
    rows = []
    for index in range(count):
        a, b = index % 9 + 1, index // 9 % 9 + 1
        text = f"What is {a} + {b}?"
        rows.append({"prompt": [{"role": "user", "content": text}] if messages else text, "label": str(a + b)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start_training(
    directory: Path, *arguments: object, entry: str = "train.py", **environment: str
) -> subprocess.Popen:
    """Starts `python train.py arguments` in `directory`; its output goes to `output.txt` there."""
    with (directory / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / entry), *map(str, arguments)],
            cwd=directory,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        )


def run_training(directory: Path, *arguments: object, timeout: float = 500, entry: str = "train.py") -> Ended:
    """Runs `python train.py arguments` in `directory` to its end; on a timeout its process group is killed."""
    output = directory / "output.txt"
    before = output.stat().st_size if output.exists() else 0
    process = start_training(directory, *arguments, entry=entry)
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        raise AssertionError(f"no end after {timeout} s:\n{output.read_text()[-5000:]}") from None
    return Ended(code, output.read_bytes()[before:].decode(errors="replace"))


def run_example(name: str, outputs: Path, *options: object, timeout: float = 350, **environment: str) -> str:
    """Runs `examples/NAME/run.sh --cpu` to its end; returns what it printed, with all its processes ended."""
    command = ["bash", f"examples/{name}/run.sh", "--cpu", "--outputs-dir", str(outputs), *map(str, options)]
    printed = outputs.parent / f"{outputs.name}-{name}.txt"
    with printed.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHON": sys.executable, **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
    assert code == 0, printed.read_text()[-5000:]
    return printed.read_text()


def metrics_of(run_dir: Path) -> list[dict]:
    """The lines of `metrics.jsonl`, without times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMING)} for line in lines]


def tiny_arguments(model: Path, data: Path, lr: float = 1e-3, estimator: str = "grpo") -> list[object]:
    """Options that make a run small enough for two cores; a random reward, so that it has gradients."""
    return [
        *("--hf-checkpoint", model, "--prompt-data", data, "--rm-type", "random"),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 8),
        *("--lr", lr, "--advantage-estimator", estimator),
    ]
