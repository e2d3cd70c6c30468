"""A run with gates (see `hooks.py`): held at a moment, its processes found and killed; then what is left of it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.running import ROOT, metrics_of, start_training

MARKER = "COLLOID_TEST_RUN"
"""Environment variable that all processes of a run inherit."""
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::RuntimeEnv", "ray::DashboardA")
"""Ray's own; they end too, but only once a report to the dead cluster has timed out, after a minute or so."""
HOOKS = ROOT / "tests/faults/hooks.py"
STEPS = 240.0
"""Seconds that each wait of a test may take on a busy machine."""


def fault_arguments(model: Path, data: Path, num_rollout: int, *, disk: bool = True) -> list[object]:
    """A deterministic run with gates at all moments; those at `sync` only with weights on disk."""
    hooks = {
        "--custom-generate-function-path": "generate",
        "--custom-rm-path": "reward_func",
        "--custom-megatron-before-train-step-hook-path": "before_train_step",
        "--data-source-path": "DataSource",
    }
    if disk:
        hooks["--custom-update-weight-post-write-path"] = "post_write"
    return [
        *("--hf-checkpoint", model, "--prompt-data", data, "--num-rollout", num_rollout, "--save-interval", 1),
        *("--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 8, "--lr", 1e-3),
        *("--advantage-estimator", "grpo", "--deterministic", "--run-name", "run"),
        *(("--update-weight-transport", "disk") if disk else ()),
        *(word for option, name in hooks.items() for word in (option, f"{HOOKS}:{name}")),
    ]


class FaultyRun:
    """`python ENTRY arguments` in `directory`."""

    def __init__(self, directory: Path, arguments: list[object], entry: str = "train.py"):
        self.directory, self.run_dir = directory, directory / "outputs/run"
        self._gates = directory / "gates"
        self._gates.mkdir(exist_ok=True)
        self._output = directory / "output.txt"
        self._marker = f"{MARKER}={secrets.token_hex(8)}"
        name, _, value = self._marker.partition("=")
        self.shared_memory: set[str] = set()
        self.process = start_training(directory, *arguments, entry=entry, **{name: value})

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @contextmanager
    def held(self, moment: str, rollout_id: int) -> Iterator[int]:
        """Inside, the run is at the moment; the id of the process that reached it. To be called before it is there."""
        gate, reached = self._gates / moment, self._gates / f"{moment}.reached"
        gate.write_text(str(rollout_id))
        self.wait_until(reached.exists, f"{moment} of rollout {rollout_id}")
        self.shared_memory |= self._shared_memory()
        try:
            yield int(reached.read_text())
        finally:
            reached.unlink()
            gate.unlink()

    def wait_until(self, condition, what: str) -> None:
        """Fails where the run ends before, or in too long a time."""
        deadline = time.monotonic() + STEPS
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output[-5000:]}"
            assert time.monotonic() < deadline, f"no {what} after {STEPS:g} s:\n{self.output[-5000:]}"
            time.sleep(0.02)

    def pids(self, who: str) -> list[int]:
        """Of `trainer`, `manager`, `engine`, `router`, `grader`, `driver`, or `node`: Ray's own process on a host."""
        if who == "driver":
            return [self.process.pid]
        return sorted(member.pid for member in self.members() if _is(member, who))

    def members(self) -> list[psutil.Process]:
        """All processes that live, wherever their parents are."""
        found = []
        for process in psutil.process_iter():
            try:
                if self._marker in (f"{name}={value}" for name, value in process.environ().items()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def end(self, timeout: float = STEPS) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout:g} s:\n{self.output[-5000:]}") from None

    def wait_until_gone(self, timeout: float = 120) -> None:
        """Returns when no process lives but Ray's agents."""
        deadline = time.monotonic() + timeout
        while left := [member for member in self.members() if not _is_agent(member)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.2)

    def kill_all(self) -> None:
        """Whatever happened, nothing of the run stays."""
        for process in self.members():
            process.kill()
        if self.process.poll() is None:
            self.process.wait(30)

    def check_nothing_left(self) -> None:
        """No process but Ray's agents, no shared memory, no half-written file."""
        self.wait_until_gone()
        assert not [path for path in self.shared_memory if os.path.exists(path)]
        assert not list(self.run_dir.glob("**/*.tmp")) and not list(self.run_dir.glob("checkpoints/.writing_*"))

    def _shared_memory(self) -> set[str]:
        """Files in /dev/shm that its processes have open or mapped."""
        found = set()
        for member in self.members():
            try:
                paths = [file.path for file in member.memory_maps()] + [file.path for file in member.open_files()]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            found |= {path for path in paths if path.startswith("/dev/shm/")}
        return found


def _is(member: psutil.Process, who: str) -> bool:
    try:
        name, line = member.name(), " ".join(member.cmdline())
    except psutil.NoSuchProcess:
        return False
    return {
        "trainer": name.startswith("ray::TrainWor"),
        "critic": name.startswith("ray::CriticWo"),
        "manager": name.startswith("ray::RolloutAc"),
        "engine": "colloid.engines.embedded" in line,
        "router": "router" in name or "sglang_router" in line,
        "node": name == "raylet",
        "grader": "colloid.rewards.worker" in line,
    }[who]


def _is_agent(member: psutil.Process) -> bool:
    try:
        return member.status() == psutil.STATUS_ZOMBIE or member.name().startswith(RAY_AGENTS)
    except psutil.NoSuchProcess:
        return True


def samples_of(run_dir: Path) -> dict[str, list[dict]]:
    """What was generated, by file: which samples of which prompts, with responses and rewards."""
    import pyarrow.parquet

    files = sorted((run_dir / "rollouts").glob("*.parquet"))
    return {path.name: pyarrow.parquet.read_table(path).to_pylist() for path in files}


def check_same_run(run_dir: Path, undisturbed: Path) -> None:
    """Metrics bit for bit, no step twice; the same samples, each prompt trained once; the same last checkpoint."""
    assert metrics_of(run_dir) == metrics_of(undisturbed)
    assert samples_of(run_dir) == samples_of(undisturbed)
    marker = "checkpoints/latest_checkpointed_iteration.txt"
    assert (run_dir / marker).read_text() == (undisturbed / marker).read_text()
    last = f"checkpoints/iter_{int((run_dir / marker).read_text()):07d}"
    first, second = (sorted((place / last / "trainer").rglob("*.distcp")) for place in (run_dir, undisturbed))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def restarts_of(run_dir: Path) -> list[dict]:
    path = run_dir / "restarts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill(pids: list[int]) -> None:
    """SIGKILL to each."""
    assert pids, "there is nobody to kill"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
