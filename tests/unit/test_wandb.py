"""Weights & Biases, offline: what is kept, that a resumed run goes on in it, and that keys stay out of it."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
import time

import pytest

from colloid.config import parse
from colloid.config.tracking import events_directory, wandb_options
from colloid.errors import ConfigError
from colloid.observe.metrics import MetricsWriter
from colloid.observe.trackers import open_trackers

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="the extra is not installed")
KEY = "s3cretkey123456789012345678901234567890ab"


@pytest.fixture
def options(tmp_path):
    """`options(*flags)` -> the W&B options of a planned run."""

    def make(*flags):
        line = ["--dry-run", "--prompt-data", "x", "--outputs-dir", str(tmp_path), "--run-name", "run", *flags]
        return wandb_options(parse(line, "train"))

    return make


def test_without_the_option_or_disabled_nothing_is_imported(options, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert options() is None and options("--use-wandb", "--wandb-mode", "disabled") is None
    assert open_trackers(None, tmp_path, resumed=False) == []


def test_options_become_the_runs_settings_without_the_key(options):
    found = options(
        *("--use-wandb", "--wandb-project", "p", "--wandb-team", "t", "--wandb-group", "g", "--wandb-host", "http://h"),
        *("--wandb-dir", "d", "--wandb-run-id", "i", "--wandb-key", KEY, "--disable-wandb-random-suffix"),
        *("--wandb-always-use-train-step", "--num-steps-per-rollout", "4"),
    )
    assert (found.project, found.team, found.group, found.host) == ("p", "t", "g", "http://h")
    assert (found.directory, found.run_id, found.key, found.random_suffix) == ("d", "i", KEY, False)
    assert (found.always_use_train_step, found.steps_per_rollout) == (True, 4)
    assert KEY not in repr(found) and KEY not in json.dumps(found.config)
    assert found.config["wandb_key"] == "***" and found.config["num_steps_per_rollout"] == 4


def test_a_missing_package_is_an_error_before_anything_starts(tmp_path, tiny_model_dir, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else real(name, *more))
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "a", "label": "1"}\n')
    line = ["--hf-checkpoint", str(tiny_model_dir()), "--prompt-data", str(data), "--outputs-dir", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"--use-wandb needs the package wandb.*pip install wandb"):
        parse([*line, "--use-wandb"], "train")
    assert parse([*line, "--use-wandb", "--wandb-mode", "disabled"], "train").use_wandb


def test_tensorboards_directory_has_the_names_that_are_given(tmp_path):
    def directory(*flags):
        line = ["--dry-run", "--prompt-data", "x", "--outputs-dir", "out", "--run-name", "run", *flags]
        return events_directory(parse(line, "train"))

    assert directory() == "out/run" and directory("--tb-project-name", "p") == "out/tensorboard/p/run"
    assert directory("--tb-experiment-name", "e") == "out/tensorboard/colloid/e"
    with pytest.raises(ConfigError, match="--tb-project-name '../x' is to be the name of a directory"):
        directory("--tb-project-name", "../x")


def test_options_without_use_wandb_are_warned_of():
    args = parse(["--dry-run", "--prompt-data", "x", "--wandb-project", "p"], "train")
    assert any("--wandb-project: no effect without --use-wandb" in text for text in args.warnings)


def entries(log):
    """The entries of a W&B file: a log as LevelDB has it, in blocks of 32 KiB, behind 7 bytes of its own."""
    entry, at = b"", 7
    while at + 7 <= len(log):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        if at + 7 + length > len(log):  # it is being written
            return
        entry += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


def records(directory):
    """History rows of all offline runs in a directory, (run id, row), once W&B's own process has written their ends."""
    rows = []
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        deadline = time.monotonic() + 60
        while "exit" not in (found := of_file(path)):
            assert time.monotonic() < deadline, f"{path} has no end, only {sorted(found)}"
            time.sleep(0.1)
        rows += [(path.stem.removeprefix("run-"), row) for row in found["history"]]
    return rows


def of_file(path):
    """Kind -> the records of that kind, those of the history as what was logged."""
    from wandb.proto import wandb_internal_pb2

    found = {"history": []}
    for data in entries(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        row = {(it.key or "/".join(it.nested_key)): json.loads(it.value_json) for it in record.history.item}
        found.setdefault(kind, []).append(row)
    return found


@needs_wandb
@pytest.mark.timeout(240)
def test_a_resumed_run_goes_on_in_the_same_wandb_run_and_no_key_is_on_disk(options, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--wandb-key", KEY, f"--wandb-key={KEY}", "--wandb-group", "g"])
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = ("--use-wandb", "--wandb-mode", "offline", "--wandb-key", KEY, "--wandb-group", "g")
    found = options(*flags, "--num-steps-per-rollout", "2", "--global-batch-size", "8")
    with MetricsWriter(tmp_path, trackers=open_trackers(found, tmp_path, resumed=False)) as writer:
        writer.log(0, {"eval/a": 0.5})
        writer.log(1, {"rollout/raw_reward": 1.5})
    state = json.loads((tmp_path / "wandb_run.json").read_text())
    assert state["group"].startswith("g_") and state["name"] == state["group"] and state["num_rows"] == 2
    time.sleep(1.1)  # W&B names the files of an offline run by the second
    with MetricsWriter(tmp_path, 0, open_trackers(found, tmp_path, resumed=True)) as writer:
        writer.log(1, {"rollout/raw_reward": 2.5})
    assert json.loads((tmp_path / "wandb_run.json").read_text()) == {**state, "num_rows": 3}
    rows = records(tmp_path)
    assert {run_id for run_id, _ in rows} == {state["id"]}
    assert [row["_step"] for _, row in rows] == [0, 1, 2]
    assert [row.get("rollout/raw_reward") for _, row in rows] == [None, 1.5, 2.5]
    assert [(row["rollout/step"], row["eval/step"], row["train/step"]) for _, row in rows] == [
        *((0, 0, 0), (1, 1, 2), (1, 1, 2))
    ]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if KEY.encode() in path.read_bytes()]
    assert sys.argv[2] == KEY, "the command line is as it was"
