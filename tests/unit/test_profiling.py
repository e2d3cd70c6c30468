"""Profiles and recordings of memory that open, and the options that ask for them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import memray
import pytest
import torch

from colloid.config import parse
from colloid.config.profiling import ProfileOptions, profile_options
from colloid.errors import ConfigError
from colloid.training import memory_history, profiling
from colloid.training.profiling import Recording

PLAN = ["--dry-run", "--num-layers", "2", "--device", "cpu"]
PARTS = ("train_log_probs", "train_actor")


def options(directory: Path, **changes) -> ProfileOptions:
    values = {
        "ranks": frozenset([0]),
        "rollouts": range(1, 3),
        "targets": frozenset(["train_overall"]),
        "profile_dir": str(directory / "profiles"),
        "recorder": None,
        "memory_dir": str(directory / "memory"),
        "memory_rollouts": None,
    }
    return ProfileOptions(**values | changes)


def train(recording: Recording, rollouts: int) -> None:
    """As a rank does: passes before the steps, then the steps."""
    for rollout_id in range(rollouts):
        with recording.rollout(rollout_id):
            for part in PARTS:
                with recording.part(part, rollout_id):
                    torch.ones(64, 64) @ torch.ones(64, 64)


def events(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_the_rollouts_that_are_asked_for_are_traced_with_their_parts(tmp_path):
    train(Recording(options(tmp_path), "actor", 0, cuda=False), 4)
    files = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert files == [f"train_overall.rollout{rollout}.actor0.json.gz" for rollout in (1, 2)]
    found = events(tmp_path / "profiles" / files[0])
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in found if event.get("ph") == "X"}
    begin, end = spans["train_overall"]
    for part in PARTS:
        assert begin <= spans[part][0] <= spans[part][1] <= end
    assert "aten::mm" in spans
    assert any(event["name"] == "[memory]" and event["args"]["Bytes"] >= 4 * 64 * 64 for event in found)


def test_a_part_alone_is_traced_alone(tmp_path):
    train(Recording(options(tmp_path, targets=frozenset(PARTS)), "actor", 0, cuda=False), 2)
    for part in PARTS:
        names = {event["name"] for event in events(tmp_path / f"profiles/{part}.rollout1.actor0.json.gz")}
        assert part in names and names.isdisjoint({"train_overall", *PARTS} - {part})


def test_other_ranks_record_nothing(tmp_path):
    recording = Recording(options(tmp_path, recorder="memray"), "actor", 1, cuda=False)
    recording.start()
    train(recording, 3)
    recording.close()
    assert not list(tmp_path.iterdir())


MEMRAY = """
import sys
from pathlib import Path
from colloid.training.memory_history import open_history

def a_model():
    return bytearray(20_000_000)

def deep(depth):  # memray loses as many of the outermost frames as there were when it began
    return deep(depth - 1) if depth else a_model()

history = open_history("memray", Path(sys.argv[1]), "actor0")
kept = [deep(10), deep(10)]
history.finish()
kept.append(deep(10))
"""


def test_memray_records_allocations_with_their_stacks(tmp_path):
    (tmp_path / "actor0.memray.bin").write_text("that of a run before")
    subprocess.run([sys.executable, "-c", MEMRAY, str(tmp_path)], check=True, timeout=100)
    assert (tmp_path / "actor0.memray.bin").read_text() == "that of a run before"
    reader = memray.FileReader(tmp_path / "actor0-2.memray.bin")
    assert 40_000_000 <= reader.metadata.peak_memory < 60_000_000, "what comes after its end is not in it"
    records = list(reader.get_high_watermark_allocation_records(merge_threads=True))
    largest = max(records, key=lambda record: record.size)
    assert largest.size >= 20_000_000 and "a_model" in [frame[0] for frame in largest.stack_trace()]


def test_a_recording_ends_after_as_many_rollouts_as_asked_for(tmp_path, monkeypatch):
    ended = []
    history = type("History", (), {"finish": lambda self: ended.append(len(ended)) or "file"})
    monkeypatch.setattr(profiling, "open_history", lambda recorder, directory, name: history())
    recording = Recording(options(tmp_path, recorder="memray", memory_rollouts=2), "actor", 0, cuda=False)
    recording.start()
    train(recording, 1)
    assert ended == []
    train(recording, 2)
    assert ended == [0]
    recording.close()
    assert ended == [0]
    endless = Recording(options(tmp_path, recorder="memray"), "actor", 0, cuda=False)
    endless.start()
    train(endless, 1)
    assert ended == [0]
    endless.close()
    assert ended == [0, 1]


def test_cuda_memory_is_written_where_memory_runs_out(tmp_path, monkeypatch):
    """What of torch is for CUDA alone is replaced."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: calls.append(kw))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    recording = Recording(options(tmp_path, recorder="torch"), "actor", 0, cuda=False)
    recording.start()
    with pytest.raises(torch.OutOfMemoryError), recording.rollout(0):
        raise torch.OutOfMemoryError
    assert (tmp_path / "memory/actor0.pickle").read_text() == "snapshot"
    assert calls == [{"max_entries": memory_history.MOST_EVENTS}, {"enabled": None}]
    recording.close()


def plan(*argv: str):
    return parse([*PLAN, *argv])


def test_what_is_recorded_follows_from_the_options():
    found = profile_options(plan())
    assert (list(found.rollouts), found.recorder) == ([], None)
    found = profile_options(
        plan("--use-pytorch-profiler", "--profile", "--profile-step-start", "3", "--profile-step-end", "5")
    )
    assert (list(found.rollouts), found.targets, found.ranks) == ([3, 4], {"train_overall"}, {0})
    argv = "--record-memory-history --memory-recorder memray --memory-snapshot-num-steps 4 --memory-snapshot-dir m"
    found = profile_options(plan(*argv.split(), "--actor-num-gpus-per-node", "2", "--profile-ranks", "0", "1"))
    assert (found.recorder, found.memory_rollouts, found.memory_dir, found.ranks) == ("memray", 4, "m", {0, 1})


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--profile", ["--use-pytorch-profiler", "Nsight"]),
        ("--profile-step-start 3", ["--profile-step-start", "without --use-pytorch-profiler"]),
        ("--use-pytorch-profiler --profile-step-start 12", ["12", "leave no rollout"]),
        ("--use-pytorch-profiler --profile-target train_overall train_actor", ["has the other parts in it"]),
        ("--use-pytorch-profiler --profile-ranks 0 3", ["--profile-ranks 3", "0 to 0"]),
        ("--record-memory-history", ["--memory-recorder memray", "CUDA's allocator"]),
        ("--memory-snapshot-num-steps 2", ["without --record-memory-history"]),
    ],
)
def test_options_that_record_nothing_are_refused(argv, words):
    with pytest.raises(ConfigError) as caught:
        plan(*argv.split())
    assert all(word in str(caught.value) for word in words), caught.value


def test_rollouts_that_a_run_does_not_have_are_warned_of():
    warnings = plan("--use-pytorch-profiler", "--num-rollout", "10").warnings
    assert any("--profile-step-start 10 is not among the 10 rollouts" in text for text in warnings)
