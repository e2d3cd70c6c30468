"""Training through the real SGLang: needs scripts/install_sglang_cpu.sh, and minutes."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from colloid.config.sglang_installed import find_python
from tests.e2e.running import ROOT, metrics_of, run_training, tiny_arguments, write_sums

SGLANG = find_python(Namespace(rollout_engine_python=None))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(SGLANG is None, reason="needs SGLang: bash scripts/install_sglang_cpu.sh"),
]


def _train(directory: Path, *arguments: object) -> list[dict]:
    """The metrics of three rollouts; weights were compared after each update."""
    ended = run_training(
        directory,
        *arguments,
        *("--rollout-engine", "sglang", "--rollout-engine-python", SGLANG, "--num-rollout", 3),
        *("--check-weight-update-equal", "--run-name", "run"),
        timeout=3000,
    )
    assert ended.code == 0, ended.output[-5000:]
    assert ended.output.count("tensors equal on all engines") == 4, ended.output[-5000:]
    steps = [line for line in metrics_of(directory / "outputs" / "run") if "train/loss" in line]
    assert len(steps) == 3
    return steps


def _left() -> str:
    """Processes of SGLang that live."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in found.splitlines() if SGLANG in line and "pytest" not in line)


def test_grpo_with_a_tiny_model(tmp_path, tiny_model_dir):
    before = _left()
    data = write_sums(tmp_path / "data.jsonl", 12)
    for step in _train(tmp_path, *tiny_arguments(tiny_model_dir(), data)):
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert _left() == before


def test_grpo_with_smollm2(tmp_path):
    fetch = [sys.executable, str(ROOT / "scripts/fetch_smollm2.py")]
    model = Path(subprocess.run(fetch, stdout=subprocess.PIPE, text=True, check=True, timeout=900).stdout.strip())
    data = write_sums(tmp_path / "data.jsonl", 12, messages=True)
    for step in _train(tmp_path, *tiny_arguments(model, data, lr=1e-5), "--apply-chat-template"):
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-3
