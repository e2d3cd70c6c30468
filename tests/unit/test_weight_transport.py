"""Buckets, and the shared-memory file that carries them."""

from __future__ import annotations

import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colloid.engines.checksums import tensor_checksum as checksum
from colloid.engines.control import EngineControl
from colloid.errors import WeightSyncError
from colloid.weights import engine_update, ring_writer
from colloid.weights.buckets import ALIGNMENT, make_buckets
from colloid.weights.engine_update import EngineUpdate
from colloid.weights.ring_writer import RingWriter
from colloid.weights.tensor_transport import TensorSender
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
    monkeypatch.setattr(ring_writer, "SHARED_DIRECTORIES", (tmp_path,))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = RecordingEngine()
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "one": torch.tensor([2.5]),
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


class Server(BaseHTTPRequestHandler):
    """Keeps connections open; what it is asked under /hang it never answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        vars(self.server).setdefault("clients", []).append(self.client_address)
        if self.path in self.server.hangs_at:
            self.server.ended.wait(60)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.hangs_at, server.ended, server.clients = set(), threading.Event(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


def test_an_update_takes_few_connections_and_leaves_none(server, monkeypatch):
    control = EngineControl(f"http://127.0.0.1:{server.server_port}", "key")
    with EngineUpdate([control], 1) as update:
        for _ in range(20):
            update.post("part", "/part")
    assert len(server.clients) == 23 and len(set(server.clients)) == 1
    control.post("/part")
    control.post("/part")
    assert len(set(server.clients)) == 3, "outside an update each call has its own"
    monkeypatch.setattr("colloid.engines.control.LONGEST_IDLE", 0.0)
    with EngineUpdate([control], 2) as update:
        update.post("part", "/part")
    assert len(set(server.clients)) == 7, "one that was idle too long is not used: the server may close it"


def test_an_engine_that_hangs_is_found_when_it_is_to_pause(server, monkeypatch):
    monkeypatch.setattr(engine_update, "PAUSE_TIMEOUT", 0.3)
    monkeypatch.setattr(engine_update, "CONTINUE_TIMEOUT", 0.3)
    server.hangs_at |= {"/pause_generation", "/continue_generation"}
    control = EngineControl(f"http://127.0.0.1:{server.server_port}", "key", timeout=300)
    with pytest.raises(WeightSyncError, match=r"pause: 1 of 1 engines failed: .* no answer in 0\.3 s"):
        EngineUpdate([control], 1).__enter__()


def test_the_file_is_kept_and_leftovers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_writer, "SHARED_DIRECTORIES", (tmp_path,))
    leftover = tmp_path / (ring_writer.PREFIX + "killed")
    leftover.write_bytes(b"x")
    others = tmp_path / "another's", tmp_path / (ring_writer.PREFIX + "to be locked")
    for other in others:
        other.touch()
    (tmp_path / (ring_writer.PREFIX + "link")).symlink_to(others[0])
    (tmp_path / (ring_writer.PREFIX + "gone")).symlink_to("nowhere")
    kept = sorted(tmp_path.iterdir())
    kept.remove(leftover)
    living, other = RingWriter(1000), RingWriter(1000)
    living.begin(1)
    path = living.path
    living.begin(2)
    assert living.path == path
    other.begin(1)
    assert not leftover.exists()
    assert len(list(tmp_path.iterdir())) == len(kept) + 2
    living.close()
    other.close()
    assert sorted(tmp_path.iterdir()) == kept


def test_no_room_is_an_error_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_writer, "SHARED_DIRECTORIES", (tmp_path,))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ring_writer.os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="no room for 4480 bytes .*No space left"):
        RingWriter(400).begin(1)
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_made_another_place_is_taken(tmp_path, monkeypatch):
    places = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(ring_writer, "SHARED_DIRECTORIES", places)
    for place in places:
        place.mkdir()
    read_only, open_file, unlink = {places[0]}, ring_writer.os.open, Path.unlink

    def refusing(call):
        def refused(path, *args, **options):
            if Path(path).parent in read_only:
                raise OSError(30, "Read-only file system")
            return call(path, *args, **options)

        return refused

    monkeypatch.setattr(ring_writer.os, "open", refusing(open_file))
    monkeypatch.setattr(Path, "unlink", refusing(unlink))
    ring = RingWriter(400)
    ring.begin(1)
    assert ring.path.parent == places[1]
    ring.close()
    read_only.add(places[1])
    with pytest.raises(WeightSyncError, match="no room for 4480 bytes .*first: .*Read-only.*second: .*Read-only"):
        RingWriter(400).begin(1)
