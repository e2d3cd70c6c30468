"""Where a trainer's memory goes while it is given back, and whose turn it is to have it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from colloid.cluster.turns import MemoryTurns
from colloid.errors import ColloidError
from colloid.observe.resident import Resident, take_resident, take_tree
from colloid.training import offload_store
from colloid.training.offload import Held, Offload
from colloid.training.offload_store import FileStore, PinnedStore, file_system


@pytest.fixture(params=["file", "blocks"])
def store(request, tmp_path, monkeypatch):
    if request.param == "file":
        monkeypatch.setattr(offload_store, "MOST_BYTES_A_CALL", 5000)
        made = FileStore([tmp_path])
    else:
        plain = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: plain(*shape, **more))
        made = PinnedStore(block_bytes=4096)
    yield made
    made.close()


def test_a_store_gives_back_what_it_was_given_also_after_it_was_made_larger(store):
    random = torch.Generator().manual_seed(1)
    for size in (1, 4096, 30_000):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)
        store.reserve(size + 100)
        store.write(data, 100)
        found = torch.empty(size, dtype=torch.uint8)
        store.read(found, 100)
        assert torch.equal(found, data)
        store.read(found[: size // 2], 100 + size - size // 2)
        assert torch.equal(found[: size // 2], data[size - size // 2 :])


@pytest.mark.parametrize("in_place", [True, False], ids=["pages", "resized"])
def test_tensors_keep_their_values_and_views_and_each_can_be_read_meanwhile(store, in_place):
    buffer = torch.randn(50_000)
    part, whole, gradient = buffer[7:20_007].view(100, 200), torch.randn(300, 70).bfloat16(), torch.randn(9000)
    expected = [buffer.clone(), part.clone(), whole.clone()]
    held = Held([buffer, part, whole], [gradient, buffer])
    offload = Offload(lambda: held, store, torch.device("cpu"), in_place=in_place)
    called = []
    for times in (1, 2):
        assert offload.release() == sum(tensor.nbytes for tensor in (buffer, whole, gradient))
        assert offload.release() == 0
        offload.when_resumed(lambda: called.append(float(part[0, 0])))
        assert len(called) == times - 1
        if in_place:
            assert not buffer[4096:40_000].any() and not gradient.any()
        else:
            assert not any(tensor.untyped_storage().nbytes() for tensor in (buffer, whole, gradient))
        for tensor, values in zip((buffer, part, whole), expected, strict=True):
            assert torch.equal(offload.read(tensor), values)
        if in_place:
            buffer.fill_(float("nan"))
            whole.fill_(float("nan"))
        offload.resume()
        assert called == times * [float(expected[1][0, 0])]
        for tensor, values in zip((buffer, part, whole), expected, strict=True):
            assert torch.equal(tensor, values) and torch.equal(offload.read(tensor), values)
        assert not gradient.any()
    assert offload.read(part).data_ptr() == part.data_ptr()  # no copy where there is memory


def test_a_directory_in_memory_is_passed_over_and_without_another_one_it_is_an_error():
    assert file_system(Path("/dev/shm")) == "tmpfs"
    with pytest.raises(ColloidError, match=r"no room for 1.00 GiB.*/dev/shm is in memory.*--no-offload-train"):
        FileStore([Path("/dev/shm")]).reserve(1 << 30)
    with pytest.raises(ColloidError, match=r"/dev/shm is in memory; /no/such: .*No such file"):
        FileStore([Path("/dev/shm"), Path("/no/such")]).reserve(100)


def test_a_disk_without_room_is_an_error_that_names_it_and_nothing_is_lost(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensor = torch.ones(10_000)
    offload = Offload(lambda: Held([tensor], []), FileStore([tmp_path]), torch.device("cpu"))
    with pytest.raises(ColloidError, match="No space left on device"):
        offload.release()
    assert not offload.released and tensor.all() and not list(tmp_path.iterdir())


def test_nothing_is_left_of_the_file_after_a_kill(tmp_path):
    code = (
        "import sys, time, torch; from pathlib import Path; from colloid.training.offload_store import FileStore;"
        "store = FileStore([Path(sys.argv[1])]); store.reserve(1 << 20);"
        "store.write(torch.ones(1 << 20, dtype=torch.uint8), 0); print('written', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "written\n"
        assert not list(tmp_path.iterdir())
    finally:
        child.kill()
        child.wait(20)
    assert not list(tmp_path.iterdir())


class Recorder:
    """An actor whose calls are noted down."""

    def __init__(self, name, calls):
        self._name, self._calls = name, calls

    def __getattr__(self, method):
        class Call:
            @staticmethod
            def remote(*arguments):
                if method.endswith("resident"):
                    return Resident(2**30, 2**31)
                self._calls.append(" ".join([self._name, method, *map(str, arguments[0] if arguments else ())]))
                return None

        return Call


def turns(calls, **options):
    ranks = [Recorder("rank 0", calls), Recorder("rank 1", calls)]
    options = {"offload_train": True, "offload_rollout": True} | options
    roles = (("trainer", ranks), ("critic", [Recorder("critic", calls)]))
    return MemoryTurns(lambda references, _what: references, Recorder("engines", calls), roles, **options)


def of_trainer(verb):
    return [f"{who} {verb}" for who in ("rank 0", "rank 1", "critic")]


def test_what_one_holds_in_its_turn_the_other_has_given_back():
    calls = []
    memory = turns(calls)
    memory.begin()
    assert calls == ["engines release_memory weights kv_cache"]
    calls.clear()
    memory.to_update()
    assert calls == [*of_trainer("offload"), "engines resume_memory weights"]
    calls.clear()
    memory.to_rollout()
    assert calls == ["engines resume_memory kv_cache"]
    calls.clear()
    memory.metrics()
    memory.to_training(update_follows=True)
    memory.to_training(update_follows=True)
    assert calls == ["engines release_memory weights kv_cache", *of_trainer("resume")]
    calls.clear()
    metrics = memory.metrics()
    assert metrics.pop("perf/offload_time") >= 0
    assert metrics == {
        "perf/memory/rollout/trainer_rss_gib": 2.0,
        "perf/memory/rollout/critic_rss_gib": 1.0,
        "perf/memory/rollout/engine_rss_gib": 1.0,
        "perf/memory/rollout/trainer_rss_peak_gib": 4.0,
        "perf/memory/rollout/critic_rss_peak_gib": 2.0,
        "perf/memory/rollout/engine_rss_peak_gib": 2.0,
    }


def test_weights_that_no_update_would_bring_back_stay_in_the_engines():
    calls = []
    memory = turns(calls)
    memory.to_rollout()
    calls.clear()
    memory.to_training(update_follows=False)
    assert calls[0] == "engines release_memory kv_cache"
    calls.clear()
    memory.to_rollout()
    assert calls == [*of_trainer("offload"), "engines resume_memory weights", "engines resume_memory kv_cache"]


def test_what_the_options_leave_in_its_place_is_not_moved():
    calls = []
    memory = turns(calls, offload_train=False, offload_rollout=False)
    memory.begin()
    memory.to_update()
    memory.to_rollout()
    memory.to_training(update_follows=True)
    memory.to_rollout()
    assert calls == [] and "perf/offload_time" not in memory.metrics()


def test_the_size_of_processes_is_the_systems_and_its_peak_begins_anew():
    first = take_resident()
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    more = take_resident()
    assert more.now - first.now > 60 << 20 and more.peak >= more.now
    del held
    assert take_resident().peak > first.now + (60 << 20)
    assert take_resident().peak < first.now + (40 << 20)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own = take_resident().now
        assert take_tree([os.getpid()]).now > own
        assert take_tree([child.pid]).now > 0
    finally:
        child.kill()
        child.wait(20)
    assert take_tree([child.pid]) == Resident()


def test_a_disk_of_this_machine_is_taken_before_one_of_another(tmp_path, monkeypatch):
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    near.mkdir()
    monkeypatch.setattr(offload_store, "file_system", lambda place: "nfs4" if place == far else "ext4")
    made = []
    mkstemp = tempfile.mkstemp
    monkeypatch.setattr(tempfile, "mkstemp", lambda **where: made.append(where["dir"]) or mkstemp(**where))
    store = FileStore([far, near])
    store.reserve(10)
    store.close()
    assert made == [near]
