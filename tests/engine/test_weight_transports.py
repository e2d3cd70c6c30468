"""Every way of weights to two real engines: equal after each of many syncs, memory flat, failures repaired."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from colloid.engines.checksums import tensor_checksum
from colloid.engines.control import EngineControl
from colloid.engines.delta_files import MANIFEST
from colloid.errors import EngineError, WeightSyncError
from colloid.weights import engine_update, ring_writer
from colloid.weights.equality import check_equal
from colloid.weights.senders import SendOptions, Sent, WeightSender
from colloid.weights.transports import make_sender
from tests.parallel.engine import embedded_engines

pytestmark = pytest.mark.timeout(120)
NUM_SYNCS = 20
WAYS = {
    "tensor": {"transport": "tensor"},
    "gloo": {"transport": "gloo"},
    "disk": {"transport": "disk"},
    "xor": {"transport": "disk", "mode": "delta", "delta_encoding": "xor"},
    "overwrite": {"transport": "disk", "mode": "delta", "delta_encoding": "overwrite", "delta_checksum": "blake3"},
}
PROMPT = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}


class MeddledControl(EngineControl):
    """A control whose calls can be meddled with: `meddle(path, payload)` returns what is sent, or raises."""

    meddle: Callable[[str, Any], Any] | None = None

    def post(self, path: str, payload: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        return super().post(path, self.meddle(path, payload) if self.meddle else payload, **options)


@dataclass
class Pair:
    """Two engines, the weights that a trainer would have, and the version."""

    urls: list[str]
    pids: list[int]
    model: Path
    tensors: dict[str, torch.Tensor]
    place: Path
    version: int = 100

    def controls(self) -> list[MeddledControl]:
        return [MeddledControl(url, "key", timeout=30) for url in self.urls]

    def options(self, way: str, **changes: Any) -> SendOptions:
        common = SendOptions("tensor", "full", 60_000, "in_place", self.model, self.place / "weights")
        return replace(common, **WAYS[way], **changes)

    def change(self, share: float = 0.01) -> None:
        """A small change of some elements."""
        generator = torch.Generator().manual_seed(self.version)
        for tensor in self.tensors.values():
            mask = torch.rand(tensor.shape, generator=generator) < share
            tensor += mask * 0.01 * torch.randn(tensor.shape, generator=generator)

    def sync(self, sender: WeightSender, controls: list | None = None) -> Sent:
        self.version += 1
        return sender.send(controls or self.controls(), self.version, iter(self.tensors.items()))

    def check(self, generates: bool = True) -> None:
        expected = {name: tensor_checksum(tensor) for name, tensor in self.tensors.items()}
        for control in self.controls():
            answer = control.post("/weights_checker", {"action": "checksum"})
            check_equal(expected, answer["checksums"], control.url)
            assert answer["weight_version"] == str(self.version)
            if generates:
                assert control.post("/generate", PROMPT)["meta_info"]["weight_version"] == str(self.version)

    def resident(self) -> list[float]:
        """MiB of the engines and of this process."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in [*self.pids, os.getpid()]]
        return [count * os.sysconf("SC_PAGE_SIZE") / 2**20 for count in pages]


@pytest.fixture(scope="module")
def engines(tiny_model_dir, tmp_path_factory) -> Iterator[Pair]:
    model, place = tiny_model_dir("qwen3"), tmp_path_factory.mktemp("transports")
    with embedded_engines({"a": model, "b": model}, place, "--weights-dir", str(place / "weights")) as urls:
        pids = [json.loads((place / f"ready_{row}.json").read_text())["pid"] for row in range(2)]
        yield Pair(list(urls.values()), pids, model, load_file(model / "model.safetensors"), place)


@contextmanager
def sending(pair: Pair, way: str, **changes: Any) -> Iterator[WeightSender]:
    sender = make_sender(pair.options(way, **changes))
    try:
        yield sender
    finally:
        sender.close()
        assert not list((pair.place / "weights").glob("*")), "files are left behind"


@pytest.mark.parametrize("way", WAYS)
def test_after_each_of_many_syncs_both_engines_hold_the_senders_tensors_and_memory_is_flat(engines, way):
    resident, moved = [], []
    with sending(engines, way) as sender:
        for sync in range(NUM_SYNCS):
            engines.change()
            sent = engines.sync(sender)
            assert sent.num_tensors == len(engines.tensors)
            engines.check(generates=sync % 5 == 0)
            resident.append(engines.resident())
            moved.append(sent.num_bytes)
    growth = [after - before for before, after in zip(resident[5], resident[-1], strict=True)]
    assert max(growth) < 8, f"resident memory grew (MiB): {growth}"
    total = sum(tensor.nbytes for tensor in engines.tensors.values())
    assert total <= moved[0] < 1.05 * total
    deltas = way in ("xor", "overwrite")
    assert max(moved[1:]) < 0.12 * total if deltas else min(moved) >= total  # a tiny model's manifest weighs


def refused(engines: Pair, sender: WeightSender, controls: list | None, match: str) -> None:
    """A failed update: said why; what is a mixture generates nothing; the next one makes it good."""
    engines.change()
    with pytest.raises(WeightSyncError, match=match):
        engines.sync(sender, controls)
    for control in engines.controls():
        try:
            assert control.post("/generate", PROMPT)["meta_info"]["weight_version"] <= str(engines.version)
        except EngineError as error:
            assert "503" in str(error)
    engines.sync(sender)
    engines.check()


class Forgetful:
    """A checksum that misses the last byte of each piece."""

    def __init__(self, make: Callable[[], Any] = xxhash.xxh3_128) -> None:
        self._hasher = make()

    def update(self, data: Any) -> None:
        self._hasher.update(data[:-1])

    def digest(self) -> bytes:
        return self._hasher.digest()


def test_a_damaged_bucket_of_shared_memory_is_noticed_and_repaired(engines, monkeypatch):
    with sending(engines, "tensor") as sender:
        engines.change()
        with monkeypatch.context() as patched:
            patched.setattr(ring_writer.xxhash, "xxh3_128", Forgetful)
            with pytest.raises(WeightSyncError, match="bucket: 2 of 2 engines failed.*the sender's is"):
                engines.sync(sender)
        engines.sync(sender)
        engines.check()


@pytest.mark.parametrize("moment", ["before", "within"])
def test_an_engine_that_does_not_read_a_bucket_holds_up_no_other(engines, moment):
    def meddle(path: str, payload: Any) -> Any:
        if path != "/update_weights_from_tensor":
            return payload
        if moment == "before":
            raise EngineError("the connection broke")
        first, *others = payload["tensors"]
        return payload | {"tensors": [first | {"name": "model.nothing"}, *others]}

    controls = engines.controls()
    controls[1].meddle = meddle
    with sending(engines, "tensor") as sender:
        refused(engines, sender, controls, "bucket: 1 of 2 engines failed: .*(broke|no tensor 'model.nothing')")


def test_an_engine_that_stops_reading_is_waited_for_no_longer_than_its_deadline(engines, monkeypatch):
    monkeypatch.setattr(ring_writer, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(engine_update, "CONTINUE_TIMEOUT", 1.0)
    controls = engines.controls()
    controls[1].timeout = 4

    def stop(path: str, payload: Any) -> Any:
        if path == "/update_weights_from_tensor":
            os.kill(engines.pids[1], signal.SIGSTOP)
        return payload

    controls[1].meddle = stop
    try:
        with sending(engines, "tensor") as sender:
            engines.change()
            with pytest.raises(WeightSyncError, match="bucket: 1 of 2 engines failed: .*no answer in 4 s"):
                engines.sync(sender, controls)
            os.kill(engines.pids[1], signal.SIGCONT)
            engines.sync(sender)
            engines.check()
    finally:
        os.kill(engines.pids[1], signal.SIGCONT)


@pytest.mark.parametrize("lost", ["bucket", "checksum", "body", "end"])
def test_a_broadcast_that_an_engine_misses_ends_at_once_and_is_repaired(engines, lost):
    def meddle(path: str, payload: Any) -> Any:
        if path == "/update_weights_from_distributed" and lost == "bucket":
            raise EngineError("the connection broke")
        if path == "/update_weights_from_distributed" and lost == "checksum":
            return payload | {"checksum": "0" * 32}
        if path == "/update_weights_from_distributed" and lost == "body":
            return payload | {"weight_version": "another"}
        if path == "/end_weight_update" and lost == "end":
            raise EngineError("the connection broke")
        return payload

    controls = engines.controls()
    controls[0].meddle = meddle
    words = {"bucket": "connection broke", "checksum": "checksum of what came", "body": "another", "end": "end: 1 of 2"}
    with sending(engines, "gloo") as sender:
        engines.sync(sender)
        refused(engines, sender, controls, words[lost])


def test_an_engine_that_is_gone_is_named_and_the_others_get_a_group_without_it(engines):
    gone = MeddledControl("http://127.0.0.1:9", "key", timeout=5)
    with sending(engines, "gloo") as sender:
        refused(engines, sender, [*engines.controls(), gone], "127.0.0.1:9")


def test_an_engine_at_the_address_of_the_one_before_gets_a_new_group(engines):
    def controls(second: str) -> list[MeddledControl]:
        names = ("engine_0", second)
        return [MeddledControl(url, "key", 30, name) for url, name in zip(engines.urls, names, strict=True)]

    with sending(engines, "gloo") as sender:
        engines.sync(sender, controls("engine_1"))
        group = sender._name
        engines.sync(sender, controls("engine_1"))
        assert sender._name == group, "kept while the engines are the same"
        controls("engine_1")[1].post("/destroy_weights_update_group", {"group_name": group})  # a new one is in none
        engines.change()
        engines.sync(sender, controls("engine_2"))
        engines.check()


def damage_files(pattern: str) -> Callable[[str, list], None]:
    def hook(version_dir: str, rollout_engines: list) -> None:
        for file in Path(version_dir).glob(pattern):
            data = bytearray(file.read_bytes())
            data[-3] ^= 0xFF
            file.write_bytes(data)

    return hook


def test_damaged_weights_on_disk_are_noticed_and_the_next_version_is_good(engines):
    with sending(engines, "disk", post_write=damage_files("*-00001-of-*.safetensors")) as sender:
        engines.change()
        with pytest.raises(WeightSyncError, match="is not as it was written: its checksum differs"):
            engines.sync(sender)
    with sending(engines, "disk") as sender:
        engines.sync(sender)
        engines.check()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("way", ["disk", "xor"])
def test_a_full_disk_is_an_error_that_names_the_directory_and_harms_no_engine(engines, way):
    with sending(engines, way) as sender:
        engines.sync(sender)
        before = engines.version
        engines.change(1.0)
        with file_size_limit(5000), pytest.raises(WeightSyncError, match="could not be written to .*weight_v"):
            engines.sync(sender)
        for control in engines.controls():
            assert control.post("/generate", PROMPT)["meta_info"]["weight_version"] == str(before)
        engines.sync(sender)
        engines.check()


@pytest.mark.parametrize("damage", ["one block", "a file"])
def test_what_of_a_delta_did_not_arrive_is_sent_again_and_the_hook_is_told_of_it(engines, damage):
    again = []

    def lose(version_dir: str, rollout_engines: list) -> None:
        if version_dir.endswith("_again"):
            again.append((Path(version_dir, MANIFEST).exists(), [engine.url for engine in rollout_engines]))
            return
        for file in Path(version_dir).glob("delta-*.bin"):
            if damage == "a file":
                file.unlink()
            else:
                damage_files("delta-*.bin")(version_dir, rollout_engines)

    with sending(engines, "xor", post_write=lose) as sender:
        engines.sync(sender)
        engines.change()
        sent = engines.sync(sender)
        engines.check()
    assert again == [(True, engines.urls)]
    total = sum(tensor.nbytes for tensor in engines.tensors.values())
    assert sent.num_bytes > 0.5 * total if damage == "a file" else sent.num_bytes < 0.5 * total


def test_a_delta_against_another_base_is_refused_and_all_is_sent_next(engines):
    def change_base(version_dir: str, rollout_engines: list) -> None:
        file = Path(version_dir, MANIFEST)
        if file.exists():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"base_version": "7"}))

    with sending(engines, "xor", post_write=change_base) as sender:
        engines.sync(sender)
        before = engines.version
        engines.change()
        with pytest.raises(WeightSyncError, match="from version '7' to .*: send all weights"):
            engines.sync(sender)
        for control in engines.controls():
            assert control.post("/generate", PROMPT)["meta_info"]["weight_version"] == str(before)
        total = sum(tensor.nbytes for tensor in engines.tensors.values())
        assert engines.sync(sender).num_bytes == total
        engines.check()


def test_an_engine_with_another_version_gets_all_weights(engines):
    total = sum(tensor.nbytes for tensor in engines.tensors.values())
    with sending(engines, "overwrite") as sender:
        engines.sync(sender)
        with closing(make_sender(engines.options("tensor"))) as other:
            other.send(engines.controls()[1:], 5000, iter(engines.tensors.items()))
        engines.change()
        assert engines.sync(sender).num_bytes == total
        engines.check()
        engines.change()
        assert engines.sync(sender).num_bytes < total / 2
        engines.check()


def test_kept_files_are_those_that_the_hook_knows(engines, tmp_path):
    calls = []
    place = engines.place / "weights" / "kept"
    options = engines.options("xor", disk_dir=place, keep_files=True, post_write=lambda *call: calls.append(call))
    sender = make_sender(options)
    engines.sync(sender)
    engines.change()
    engines.sync(sender)
    engines.check()
    sender.close()
    names = [f"weight_v{version:06d}" for version in (engines.version - 1, engines.version)]
    assert sorted(path.name for path in place.iterdir()) == names
    assert [Path(version_dir).name for version_dir, _ in calls] == names
    assert [control.url for control in calls[0][1]] == engines.urls
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    place.rmdir()


@pytest.mark.parametrize("path", ["/etc", "{place}/weights/../", "{place}/weights/link", "{place}/weights/none", "\0"])
def test_weights_are_read_only_from_where_the_engine_was_told(engines, path):
    place = engines.place / "weights"
    place.mkdir(exist_ok=True)
    link = place / "link"
    link.symlink_to(engines.model)
    control = engines.controls()[0]
    control.post("/pause_generation", {"mode": "in_place"})
    try:
        for load_format in ("auto", "delta"):
            body = {"model_path": path.format(place=engines.place), "load_format": load_format}
            with pytest.raises(EngineError, match="400.*(weights are read below|cannot read weights)"):
                control.post("/update_weights_from_disk", body)
    finally:
        link.unlink()
        control.post("/continue_generation")


def test_an_update_from_disk_needs_a_pause_and_a_broadcast_a_group(engines):
    control = engines.controls()[0]
    with pytest.raises(EngineError, match="pause_generation first"):
        control.post("/update_weights_from_disk", {"model_path": str(engines.place)})
    with pytest.raises(EngineError, match="in no group 'mine'"):
        control.post("/destroy_weights_update_group", {"group_name": "mine"})
    start = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "nccl"}
    with pytest.raises(EngineError, match="the backend is gloo"):
        control.post("/init_weights_update_group", start)


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_joins_is_sent_the_current_version_alone_and_the_next_reaches_both(engines, way):
    with sending(engines, way) as sender:
        first, joins = engines.controls()
        for _ in range(2):
            engines.change()
            engines.sync(sender, [first])
        sender.send([joins], engines.version, iter(engines.tensors.items()))
        engines.check()
        for _ in range(2):
            engines.change()
            sent = engines.sync(sender)
            engines.check()
        if "mode" in WAYS[way]:
            assert sent.share < 0.5, "both hold what it is made against"
        engines.change()
        engines.sync(sender, [joins])  # and the first one has left
        assert engines.controls()[1].get("/model_info")["weight_version"] == str(engines.version)
        engines.sync(sender)
        engines.check()
