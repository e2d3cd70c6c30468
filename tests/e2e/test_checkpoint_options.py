"""Checkpoints from the command line: in the background, as a Hugging Face directory, converted, as start weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from colloid.weights.hf_loader import HFCheckpoint
from tests.e2e.running import ROOT, metrics_of, run_training, tiny_arguments, write_sums

pytestmark = pytest.mark.timeout(900)


def tool(name: str, *arguments: object) -> str:
    """Runs one of `tools/`; returns what it printed."""
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    return f"{ended.returncode} {ended.stdout}{ended.stderr}"


def same_tensors(first: Path, second: Path) -> bool:
    ours, theirs = HFCheckpoint(first), HFCheckpoint(second)
    assert set(ours.names()) == set(theirs.names())
    return all(ours.tensor(name).equal(theirs.tensor(name)) for name in ours.names())


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model_dir) -> Path:
    """Two rollouts, saved in the background and as Hugging Face directories."""
    directory = tmp_path_factory.mktemp("run")
    data = write_sums(directory / "data.jsonl", 8)
    options = ["--num-rollout", 2, "--save-interval", 1, "--async-save", "--save-hf", "hf_{rollout_id}"]
    ended = run_training(directory, *tiny_arguments(tiny_model_dir("qwen3"), data), *options, "--run-name", "run")
    assert ended.code == 0, ended.output
    assert "never read" not in ended.output
    return directory


def test_background_checkpoints_are_committed_and_loadable(run):
    checkpoints = run / "outputs/run/checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "1"
    names = ["iter_0000000", "iter_0000001", "latest_checkpointed_iteration.txt"]
    assert sorted(path.name for path in checkpoints.iterdir()) == names
    assert not list(run.glob(".writing_*"))


def test_hugging_face_directory_is_the_checkpoint_converted(run, tiny_model_dir):
    printed = tool(
        "convert_torch_dist_to_hf.py",
        *("--input-dir", run / "outputs/run/checkpoints", "--output-dir", run / "converted"),
        *("--origin-hf-dir", tiny_model_dir("qwen3")),
    )
    assert printed.startswith("0 "), printed
    assert same_tensors(run / "hf_1", run / "converted")
    assert not same_tensors(run / "hf_0", run / "hf_1")


def test_converted_model_is_start_and_reference(run, tmp_path, tiny_model_dir):
    printed = tool("convert_hf_to_torch_dist.py", "--hf-checkpoint", run / "hf_1", "--save", tmp_path / "torch_dist")
    assert printed.startswith("0 "), printed
    data = write_sums(tmp_path / "data.jsonl", 8)
    start = [*tiny_arguments(tiny_model_dir("qwen3"), data, lr=0), "--num-rollout", 1, "--use-kl-loss"]
    for name, load in (("converted", tmp_path / "torch_dist"), ("finetuned", run / "outputs/run/checkpoints")):
        options = ["--load", load, "--ref-load", tmp_path / "torch_dist", "--finetune", "--run-name", name]
        ended = run_training(tmp_path, *start, *options, "--save-hf", f"hf_{name}")
        assert ended.code == 0, ended.output
        assert metrics_of(tmp_path / "outputs" / name)[0]["train/kl_loss"] == 0.0
        assert same_tensors(tmp_path / f"hf_{name}", run / "hf_1")


def test_tools_name_what_does_not_fit(run, tmp_path, tiny_model_dir):
    model = tiny_model_dir("qwen3", hidden=96)
    given = ["--input-dir", run / "outputs/run/checkpoints", "--output-dir", tmp_path / "out", "--origin-hf-dir", model]
    printed = tool("convert_torch_dist_to_hf.py", *given)
    assert printed.startswith("2 ") and "Traceback" not in printed
    assert "decoder.layers.mlp.linear_fc2.weight is (2, 64, 192) where the model has (2, 96, 288)" in printed
