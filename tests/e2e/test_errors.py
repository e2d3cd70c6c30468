"""Mistakes of a new user: each ends the run with one clear message, and before anything heavy starts."""

import json
import socket
import subprocess

import pytest

from tests.e2e.running import run_training, write_sums


@pytest.fixture
def data(tmp_path):
    return write_sums(tmp_path / "data.jsonl", 8)


def _refused(tmp_path, *arguments, code: int = 2) -> str:
    ended = run_training(tmp_path, *arguments, timeout=400)
    assert ended.code == code, ended.output
    assert "\nerror: " in "\n" + ended.output
    return ended.output.split("error: ", 1)[1]


def test_a_missing_model(tmp_path, data):
    output = _refused(tmp_path, "--hf-checkpoint", "no/such/model", "--prompt-data", data)
    assert "no/such/model" in output and "--hf-checkpoint" in output


def test_a_missing_data_file(tmp_path, tiny_model_dir):
    output = _refused(tmp_path, "--hf-checkpoint", tiny_model_dir(), "--prompt-data", "missing.jsonl")
    assert "missing.jsonl" in output


def test_a_bad_row(tmp_path, tiny_model_dir, data):
    data.write_text(data.read_text() + '{"prompt": "half\n')
    output = _refused(tmp_path, "--hf-checkpoint", tiny_model_dir(), "--prompt-data", data)
    assert "data.jsonl:9" in output


def test_a_wrong_key(tmp_path, tiny_model_dir, data):
    output = _refused(tmp_path, "--hf-checkpoint", tiny_model_dir(), "--prompt-data", data, "--input-key", "question")
    assert "'question'" in output and "'prompt'" in output and "--input-key" in output


def test_a_misspelled_flag(tmp_path, tiny_model_dir, data):
    output = _refused(tmp_path, "--hf-checkpoint", tiny_model_dir(), "--prompt-data", data, "--rollout-bach-size", 4)
    assert "--rollout-bach-size" in output and "--rollout-batch-size" in output


def test_contradictory_batch_sizes(tmp_path, tiny_model_dir, data):
    output = _refused(
        tmp_path,
        *("--hf-checkpoint", tiny_model_dir(), "--prompt-data", data),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--global-batch-size", 10),
    )
    assert "4 × 4 = 16" in output and "10" in output


def test_a_port_in_use(tmp_path, tiny_model_dir, data):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = _refused(
            tmp_path,
            "--hf-checkpoint",
            tiny_model_dir(),
            "--prompt-data",
            data,
            "--sglang-router-port",
            port,
            *("--rollout-batch-size", 4, "--rm-type", "random"),
        )
    assert str(port) in output and "in use" in output


def test_no_labels_and_no_reward(tmp_path, tiny_model_dir, data):
    data.write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(8)))
    output = _refused(tmp_path, "--hf-checkpoint", tiny_model_dir(), "--prompt-data", data, "--rollout-batch-size", 4)
    assert "--rm-type" in output and "--custom-rm-path" in output


def test_a_reward_function_that_raises(tmp_path, tiny_model_dir, data):
    (tmp_path / "my_reward.py").write_text("async def reward_func(args, sample, **kw):\n    return 1 / 0\n")
    output = _refused(
        tmp_path,
        *("--hf-checkpoint", tiny_model_dir(), "--prompt-data", data, "--rollout-batch-size", 4),
        *("--custom-rm-path", "my_reward.py", "--rollout-max-response-len", 4),
    )
    assert "my_reward.py" in output and "ZeroDivisionError" in output


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2.5 MB: one checkpoint of the tiny model fits, a second one does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting needs root: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=30)


@pytest.mark.timeout(900)
def test_a_full_disk_ends_the_run_and_leaves_the_last_good_checkpoint(tmp_path, small_disk, tiny_model_dir, data):
    output = _refused(
        tmp_path,
        *("--hf-checkpoint", tiny_model_dir(), "--prompt-data", data, "--rollout-batch-size", 4, "--rm-type", "random"),
        *("--rollout-max-response-len", 4, "--num-rollout", 2, "--save", small_disk / "run", "--save-interval", 1),
        code=1,
    )
    assert "of 2.6 MB were free" in output and "--save" in output
    assert f"the last good one is {small_disk / 'run' / 'iter_0000000'}" in output
    assert (small_disk / "run/latest_checkpointed_iteration.txt").read_text() == "0"
    assert not list((small_disk / "run").glob(".writing_*"))
