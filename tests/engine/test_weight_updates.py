"""Weights through shared memory: complete, checked, versioned; nothing is generated with a mixture."""

import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from colloid.engines.embedded.weights import tensor_checksum
from colloid.engines.shared_ring import HEADER_BYTES
from colloid.weights.buckets import make_buckets
from colloid.weights.ring_writer import RingWriter
from tests.engine.models import add, make_engine, prompt_of, run, stream_of
from tests.engine.test_server import Background, idle

pytestmark = pytest.mark.timeout(60)
GREEDY = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
NUM_SYNCS = 24


class Sender:
    """A trainer's side of the protocol, step by step, over a ring that all weights fit into."""

    def __init__(self, server):
        self.server, self._ring = server, RingWriter(4 << 20)

    def describe(self, tensors: dict[str, torch.Tensor]) -> dict:
        """Writes the tensors into a new ring; the body of the request that sends them."""
        self.close()
        self._ring.begin(1)
        (bucket,) = make_buckets(tensors.items(), 4 << 20)
        memory = {"path": str(self._ring.path), "size": bucket.size, "begin": 0, "reader": 0}
        self._ring.put(bucket, lambda: ())
        described = [
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "offset": at}
            for name, tensor, at in zip(bucket.names, bucket.tensors, bucket.offsets, strict=True)
        ]
        return {"shared_memory": memory, "tensors": described}

    @property
    def path(self) -> Path:
        return self._ring.path

    def wait_until_read(self, body: dict) -> None:
        self._ring.wait_until_begun(body["shared_memory"]["begin"], lambda: ())

    def give_up(self) -> None:
        self._ring.give_up()

    def kill(self) -> None:
        """Lets go of the lock, as the end of a process does."""
        fcntl.flock(self._ring._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._ring.close()

    def send(self, tensors, version: str, num_buckets: int = 3) -> None:
        names = list(tensors)
        self.server.post("/begin_weight_update", {"weight_version": version})
        for i in range(num_buckets):
            bucket = self.describe({name: tensors[name] for name in names[i::num_buckets]})
            self.server.post("/update_weights_from_tensor", {"weight_version": version, **bucket})
        self.server.post("/end_weight_update", {"weight_version": version, "num_tensors": len(names)})


@pytest.fixture
def sender(server):
    sender = Sender(server)
    yield sender
    sender.close()


@pytest.fixture(autouse=True)
def _start_weights_again(server, sender, original):
    yield
    server.post("/pause_generation", {"mode": "abort"})
    sender.send(original, "0")
    server.post("/continue_generation")
    server.wait_until(idle, "the engine is idle")


@pytest.fixture(scope="module")
def original(server):
    return load_file(server.model_path / "model.safetensors")


def changed(tensors, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return {name: t + 0.03 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def test_after_each_of_many_syncs_the_tensors_are_the_senders_and_memory_is_flat(server, sender, original):
    resident = []
    for sync in range(1, NUM_SYNCS + 1):
        tensors = changed(original, sync)
        server.post("/pause_generation", {"mode": "in_place"})
        sender.send(tensors, str(sync), num_buckets=1 + sync % 4)
        server.post("/continue_generation")
        answer = server.get("/weights_checker")
        assert answer["weight_version"] == str(sync)
        assert answer["checksums"] == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
        assert server.generate(**GREEDY)["meta_info"]["weight_version"] == str(sync)
        statm = Path(f"/proc/{server.process.pid}/statm").read_text()
        resident.append(int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    assert resident[-1] - resident[3] < 8, f"resident memory grew (MiB): {resident}"


def test_generation_uses_the_new_weights_and_no_cached_prompt_of_the_old(server, sender, original, tmp_path):
    prompt = prompt_of(100, 400, 5)
    before = server.generate(prompt, **GREEDY)
    holder = Background(server, input_ids=prompt, sampling_params={"max_new_tokens": 3000, "ignore_eos": True}, rid="h")
    server.wait_until(lambda load: load["num_running_reqs"] == 1, "the prompt is in the cache")
    server.post("/pause_generation", {"mode": "in_place"})
    tensors = changed(original, 77)
    sender.send(tensors, "77")
    server.post("/continue_generation")
    after = server.generate(prompt, **GREEDY)
    assert after["meta_info"]["cached_tokens"] == 0 and after["output_ids"] != before["output_ids"]
    made = make_engine(server.model_path)
    made.store.begin()
    for name, tensor in tensors.items():
        made.store.receive(name, tensor)
    made.store.finish()
    (expected,) = add(made.engine, "a", prompt, **GREEDY)
    run(made.engine)
    log_probs = [entry[0] for entry in after["meta_info"]["output_token_logprobs"]]
    assert (after["output_ids"], log_probs) == stream_of(expected)
    server.post("/abort_request", {"rid": "h"})
    versions = holder.result["meta_info"]["weight_versions"]
    assert [span["version"] for span in versions] == ["0", "77"]
    assert versions[0]["end"] == versions[1]["start"] and versions[1]["end"] == len(holder.result["output_ids"])


def test_tensors_in_bfloat16_are_taken_as_they_are(server, sender, original):
    tensors = {name: tensor.bfloat16() for name, tensor in original.items()}
    server.post("/pause_generation", {"mode": "in_place"})
    sender.send(tensors, "bf16")
    checksums = server.post("/weights_checker", {"action": "checksum"})["checksums"]
    assert checksums == {name: tensor_checksum(tensor.float()) for name, tensor in tensors.items()}


def test_an_update_needs_a_pause_a_begin_and_one_version(server, sender, original):
    bucket = {"weight_version": "1", **sender.describe(original)}
    assert "paused" in server.post("/begin_weight_update", {"weight_version": "1"}, status=400)["error"]["message"]
    assert "begin" in server.post("/update_weights_from_tensor", bucket, status=400)["error"]["message"]
    server.post("/pause_generation", {"mode": "in_place"})
    server.post("/begin_weight_update", {"weight_version": "2"})
    assert "'2'" in server.post("/update_weights_from_tensor", bucket, status=400)["error"]["message"]


def test_an_incomplete_update_is_refused_with_what_is_missing_and_nothing_is_generated(server, sender, original):
    server.post("/pause_generation", {"mode": "in_place"})
    server.post("/begin_weight_update", {"weight_version": "1"})
    without = {name: tensor for name, tensor in original.items() if name != "model.norm.weight"}
    server.post("/update_weights_from_tensor", {"weight_version": "1", **sender.describe(without)})
    end = {"weight_version": "1", "num_tensors": len(without)}
    assert "model.norm.weight" in server.post("/end_weight_update", end, status=400)["error"]["message"]
    server.post("/continue_generation", status=400)
    server.generate(status=503, **GREEDY)
    server.get("/weights_checker", status=400)
    sender.send(original, "2")
    server.post("/continue_generation")
    assert server.generate(**GREEDY)["meta_info"]["weight_version"] == "2"


def damage(path: str) -> None:
    """Changes a byte of what was written."""
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: damage(body["shared_memory"]["path"]), "checksum"),
        (lambda body: body["shared_memory"].update(begin=64), "begins at 64, but the one before ended at 0"),
        (lambda body: body["shared_memory"].update(reader=256), "reader"),
        (lambda body: body["tensors"][0].update(name="model.nothing"), "no tensor 'model.nothing'"),
        (lambda body: body["tensors"][0].update(shape=[1, 1]), "has shape"),
        (lambda body: body["tensors"][0].update(offset=3), "aligned"),
        (lambda body: body["tensors"][0].update(offset=1 << 40), "aligned"),
        (lambda body: body["tensors"][0].update(dtype="int64"), "dtype"),
        (lambda body: body["tensors"].append(body["tensors"][0]), "within the tensor before"),
        (lambda body: body["shared_memory"].update(path="/etc/passwd"), "must lie in"),
        (lambda body: body["shared_memory"].update(path="/dev/shm/../../etc/passwd"), "must lie in"),
        (lambda body: body["shared_memory"].update(path="/dev/shm/not-there"), "cannot open"),
        (lambda body: body["shared_memory"].update(path="/dev/shm/\0"), "cannot open"),
        (lambda body: body["shared_memory"].update(size=-1), "size"),
        (lambda body: body.update(tensors="all"), "tensors"),
    ],
)
def test_a_bucket_that_is_wrong_is_refused(server, sender, original, change, message):
    server.post("/pause_generation", {"mode": "in_place"})
    server.post("/begin_weight_update", {"weight_version": "1"})
    body = json.loads(json.dumps({"weight_version": "1", **sender.describe(original)}))
    change(body)
    assert message in server.post("/update_weights_from_tensor", body, status=400)["error"]["message"]


def test_a_tensor_that_is_sent_twice_is_refused(server, sender, original):
    server.post("/pause_generation", {"mode": "in_place"})
    server.post("/begin_weight_update", {"weight_version": "1"})
    body = {"weight_version": "1", **sender.describe(original)}
    server.post("/update_weights_from_tensor", body)
    body |= sender.describe(original)
    assert "sent twice" in server.post("/update_weights_from_tensor", body, status=400)["error"]["message"]


@pytest.mark.parametrize(("end", "message"), [("give_up", "has given up"), ("kill", "has ended")])
def test_a_sender_that_ends_within_a_bucket_is_not_waited_for(server, sender, original, end, message):
    server.post("/pause_generation", {"mode": "in_place"})
    server.post("/begin_weight_update", {"weight_version": "1"})
    body = {"weight_version": "1", **sender.describe(original)}
    body["shared_memory"]["size"] += 1 << 20  # more is to come
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(server.post, "/update_weights_from_tensor", body, status=400)
        sender.wait_until_read(body)
        getattr(sender, end)()
        assert message in refused.result(30)["error"]["message"]


def test_links_are_not_followed(server, sender, original):
    body = {"weight_version": "1", **sender.describe(original)}
    link = sender.path.with_name(sender.path.name + "-link")
    link.symlink_to(sender.path)
    try:
        server.post("/pause_generation", {"mode": "in_place"})
        server.post("/begin_weight_update", {"weight_version": "1"})
        body["shared_memory"]["path"] = str(link)
        server.post("/update_weights_from_tensor", body, status=400)
    finally:
        link.unlink()
