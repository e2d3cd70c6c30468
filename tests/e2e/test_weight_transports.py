"""Weights by process group and as deltas, in whole runs; the engine's tensors are the trainer's after each update."""

from __future__ import annotations

from pathlib import Path

import pytest

from colloid.observe.metrics import read_metrics
from tests.e2e.running import run_example

pytestmark = pytest.mark.timeout(300)


def _run(outputs: Path, *options: object) -> str:
    return run_example("delta_weight_sync", outputs, "--num-rollout", 2, *options, timeout=200)


def test_the_example_moves_little_and_the_engine_has_the_trainers_weights(tmp_path):
    output = _run(tmp_path / "outputs")
    assert output.count("tensors equal on all engines") == 3
    rows, name = read_metrics(tmp_path / "outputs/delta-weight-sync"), "perf/update_weights_share"
    shares = [row[name] for row in rows if name in row]
    assert len(shares) == 2 and 0 < max(shares) < 0.05
    assert not list((tmp_path / "outputs/delta-weight-sync" / "weights").iterdir())


@pytest.mark.slow
def test_a_run_over_a_process_group(tmp_path):
    output = _run(tmp_path / "outputs", "--update-weight-mode", "full", "--update-weight-transport", "gloo")
    assert output.count("tensors equal on all engines") == 3
