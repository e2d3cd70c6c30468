"""Weights by process group and as deltas, in whole runs; the engine's tensors are the trainer's after each update."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colloid.observe.metrics import read_metrics
from tests.e2e.running import ROOT

pytestmark = pytest.mark.timeout(300)


def _run_example(outputs: Path, *options: object) -> str:
    command = ["bash", "examples/delta_weight_sync/run.sh", "--cpu", "--outputs-dir", outputs, "--num-rollout", 2]
    done = subprocess.run(
        [str(part) for part in (*command, *options)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_example_moves_little_and_the_engine_has_the_trainers_weights(tmp_path):
    output = _run_example(tmp_path)
    assert output.count("tensors equal on all engines") == 3
    rows, name = read_metrics(tmp_path / "delta-weight-sync"), "perf/update_weights_share"
    shares = [row[name] for row in rows if name in row]
    assert len(shares) == 2 and 0 < max(shares) < 0.05
    assert not list((tmp_path / "delta-weight-sync" / "weights").iterdir())


@pytest.mark.slow
def test_a_run_over_a_process_group(tmp_path):
    output = _run_example(tmp_path, "--update-weight-mode", "full", "--update-weight-transport", "gloo")
    assert output.count("tensors equal on all engines") == 3
