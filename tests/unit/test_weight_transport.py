"""Buckets, and the shared-memory file that carries them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colloid.engines.checksums import tensor_checksum as checksum
from colloid.engines.control import EngineControl
from colloid.errors import WeightSyncError
from colloid.weights import tensor_transport
from colloid.weights.buckets import ALIGNMENT, make_buckets
from colloid.weights.engine_update import EngineUpdate
from colloid.weights.tensor_transport import SharedBuffer, TensorSender
from tests.parallel.engine import RecordingEngine


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(64, 2000))
def test_buckets_keep_order_and_bound_and_alignment(sizes, bound):
    named = [(str(row), torch.zeros(size)) for row, size in enumerate(sizes)]
    buckets = list(make_buckets(named, bound))
    assert [name for bucket in buckets for name in bucket.names] == [name for name, _ in named]
    for bucket in buckets:
        assert bucket.size <= bound or len(bucket.names) == 1
        ends = [0]
        for tensor, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            assert offset % ALIGNMENT == 0 and offset >= ends[-1]
            ends.append(offset + tensor.nbytes)
        assert bucket.size == ends[-1]


def test_tensors_arrive_bit_by_bit_in_both_dtypes(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_transport, "SHARED_DIRECTORIES", (tmp_path,))
    engine = RecordingEngine()
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5),
    }
    sender = TensorSender(200, "retract")
    sent = sender.send([EngineControl(engine.url, "key")], 3, iter(tensors.items()))
    sender.close()
    assert sent.num_tensors == len(tensors)
    engine.close()
    assert engine.problems == []
    assert {name: checksum(tensor) for name, tensor in engine.updates[0].items()} == {
        name: checksum(tensor) for name, tensor in tensors.items()
    }
    assert [path for path, _ in engine.calls][:2] == ["/pause_generation", "/begin_weight_update"]
    assert [path for path, _ in engine.calls][-2:] == ["/end_weight_update", "/continue_generation"]
    assert list(tmp_path.iterdir()) == []


def test_engine_that_refuses_to_begin_is_named_and_all_are_continued():
    good, refusing = RecordingEngine(), RecordingEngine(fail_at="/begin_weight_update")
    controls = [EngineControl(engine.url, "key") for engine in (good, refusing)]
    with pytest.raises(WeightSyncError, match=f"version 9, begin: 1 of 2 engines failed: .*{refusing.url}"):
        EngineUpdate(controls, 9).__enter__()
    for engine in (good, refusing):
        engine.close()
        assert not engine.paused and engine.calls[-1][0] == "/continue_generation"


def test_file_is_reused_while_it_is_large_enough_and_leftovers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_transport, "SHARED_DIRECTORIES", (tmp_path,))
    leftover = tmp_path / (tensor_transport.PREFIX + "killed")
    leftover.write_bytes(b"x")
    others = tmp_path / "another's", tmp_path / (tensor_transport.PREFIX + "to be locked")
    for other in others:
        other.touch()
    (tmp_path / (tensor_transport.PREFIX + "link")).symlink_to(others[0])
    (tmp_path / (tensor_transport.PREFIX + "gone")).symlink_to("nowhere")
    kept = sorted(tmp_path.iterdir())
    kept.remove(leftover)
    living = SharedBuffer()
    (bucket,) = make_buckets([("a", torch.ones(100))], 10_000)
    paths = {living.fill(bucket)["shared_memory"]["path"] for _ in range(3)}
    assert len(paths) == 1
    other = SharedBuffer()
    other.fill(bucket)
    assert not leftover.exists()
    assert len(list(tmp_path.iterdir())) == len(kept) + 2
    living.close()
    other.close()
    assert sorted(tmp_path.iterdir()) == kept


def test_no_room_is_an_error_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_transport, "SHARED_DIRECTORIES", (tmp_path,))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_transport.os, "posix_fallocate", full)
    (bucket,) = make_buckets([("a", torch.ones(100))], 10_000)
    with pytest.raises(WeightSyncError, match="no room for 400 bytes of weights .*No space left"):
        SharedBuffer().fill(bucket)
    assert list(tmp_path.iterdir()) == []
