"""Memory that the engine gives back to the system and takes again, by tag; seen in its resident size."""

import logging
import shutil
import tempfile
import time
from pathlib import Path
from threading import Thread

import pytest
from safetensors.torch import load_file

from colloid.engines.control import EngineControl
from colloid.engines.embedded.weights import tensor_checksum
from colloid.engines.launch import EngineConfig, launch_engine
from colloid.engines.memory import EngineMemory
from colloid.errors import EngineError
from colloid.observe.resident import resident_bytes
from colloid.weights.senders import SendOptions
from colloid.weights.transports import make_sender

pytestmark = pytest.mark.timeout(120)
KEY = "key"
PROMPTS = [[5 + row] * 900 for row in range(4)]
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
MEBIBYTE = 2**20


class Server:
    """An engine of 130 MiB of weights: 90 of the file, and the tied head, which is packed once more."""

    def __init__(self, handle, model: Path):
        self.pid, self.model = handle.pid, model
        self.control = EngineControl(handle.wait_until_ready(), KEY)
        self.tensors = load_file(model / "model.safetensors")

    @property
    def resident(self) -> float:
        """MiB."""
        return resident_bytes(self.pid) / MEBIBYTE

    def generate(self) -> list[list[int]]:
        params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        answers = self.control.post("/generate", {"input_ids": PROMPTS, "sampling_params": params})["data"]
        return [answer["output_ids"] for answer in answers]

    def send(self, version: int, transport: str = "tensor") -> None:
        place = Path(tempfile.mkdtemp(prefix="weights-"))
        sender = make_sender(SendOptions(transport, "full", 16 * MEBIBYTE, "retract", self.model, place))
        try:
            sender.send([self.control], version, iter(self.tensors.items()))
        finally:
            sender.close()
            shutil.rmtree(place)

    def info(self) -> dict:
        return self.control.get("/server_info")


@pytest.fixture(scope="module")
def server(tiny_model_dir, tmp_path_factory):
    model = tiny_model_dir("qwen3", vocab=20000, hidden=512, layers=4, initializer_range=0.02)
    options = {"max-total-tokens": 32768, "weights-dir": tempfile.gettempdir(), "max-running-requests": 4}
    handle = launch_engine(EngineConfig(str(model), tmp_path_factory.mktemp("engine"), KEY, options=options), "engine")
    try:
        yield Server(handle, model)
        assert handle.exit_code is None
    finally:
        handle.stop()


def test_what_is_released_is_given_back_and_what_is_resumed_is_as_it_was(server):
    expected = server.generate()
    sizes = []
    for version, transport in ((1, "tensor"), (2, "disk"), (3, "gloo")):
        full = server.resident
        server.control.post(RELEASE, {"tags": ["kv_cache"]})
        without_cache = server.resident
        server.control.post(RELEASE, {"tags": ["weights"]})
        empty = server.resident
        server.control.post(RESUME, {"tags": ["weights"]})
        assert server.resident - empty < 5  # nothing is loaded
        server.send(version, transport)
        held = server.control.post("/weights_checker")["checksums"]
        assert held == {name: tensor_checksum(tensor) for name, tensor in server.tensors.items()}
        server.control.post(RESUME, {"tags": ["kv_cache"]})
        assert server.generate() == expected
        sizes.append((full, without_cache, empty))
    for full, without_cache, empty in sizes:
        assert full - without_cache > 25, sizes  # 3,600 positions of 8 KiB
        assert without_cache - empty > 115, sizes
    assert sizes[2][2] - sizes[0][2] < 25, sizes
    assert server.resident - sizes[0][0] < 80, sizes  # what updates freed is kept for the next step


def test_an_engine_whose_weights_are_released_reads_what_the_deltas_made(server):
    place = Path(tempfile.mkdtemp(prefix="weights-"))
    sender = make_sender(SendOptions("disk", "delta", 16 * MEBIBYTE, "retract", server.model, place))
    try:
        tensors = {name: tensor.clone() for name, tensor in server.tensors.items()}
        for version in (21, 22):
            server.control.post(RELEASE)
            server.control.post(RESUME, {"tags": ["weights"]})
            sent = sender.send([server.control], version, iter(tensors.items()))
            held = server.control.post("/weights_checker")
            server.control.post(RESUME)
            assert held["weight_version"] == str(version)
            assert held["checksums"] == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
            for tensor in tensors.values():
                tensor.view(-1)[::200] += 0.01
        assert sent.num_bytes < 0.1 * sum(tensor.nbytes for tensor in tensors.values())
    finally:
        sender.close()
        shutil.rmtree(place)
        server.send(0)


def test_nothing_is_generated_while_memory_is_released_or_weights_are_incomplete(server):
    def refusal(path: str, body: dict | None = None) -> str:
        with pytest.raises(EngineError) as caught:
            server.control.post(path, body)
        return str(caught.value)

    prompt = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    server.control.post(RELEASE)
    assert server.info()["released"] == ["weights", "kv_cache"] and not server.info()["weights_complete"]
    assert server.control.get("/health_generate")["released"] == ["weights", "kv_cache"]
    said = refusal("/generate", prompt)
    assert "503" in said and "weights and key-value cache is released: call /resume_memory_occupation" in said
    server.control.post(RELEASE)  # once more changes nothing
    server.control.post("/pause_generation", {"mode": "retract"})
    assert "released: call /resume_memory_occupation" in refusal("/begin_weight_update", {"weight_version": "1"})
    server.control.post(RESUME, {"tags": ["weights"]})
    assert "key-value cache is released" in refusal("/generate", prompt)
    assert "not completed" in refusal("/continue_generation")
    server.control.post(RESUME)
    assert "503" in refusal("/generate", prompt)
    server.send(9)
    assert server.info()["released"] == [] and server.info()["weights_complete"]
    assert server.control.post("/generate", prompt)["output_ids"]
    assert "weights, kv_cache" in refusal(RELEASE, {"tags": ["all"]})


def test_memory_of_a_request_under_way_is_not_released(server, caplog):
    server.control.post("/pause_generation", {"mode": "retract"})
    request = Thread(target=server.generate, daemon=True)
    request.start()
    deadline = time.monotonic() + 30
    while server.info()["internal_states"][0]["num_queued_reqs"] < len(PROMPTS):
        assert time.monotonic() < deadline, "the requests are not queued after 30 s"
        time.sleep(0.02)
    with pytest.raises(EngineError, match="4 samples are not finished"):
        server.control.post(RELEASE, {"tags": ["kv_cache"]})
    # What a run releases it has no use for: what nobody waits for is ended first.
    memory, url = EngineMemory(KEY), server.control.url
    with caplog.at_level(logging.WARNING):
        memory.release([url], ["kv_cache"])
    assert "4 samples that nobody waited for were aborted" in caplog.text
    request.join(60)
    assert not request.is_alive()
    assert memory.is_released and server.info()["released"] == ["kv_cache"]
    memory.release([url], ["kv_cache"])
    memory.resume([url, "http://127.0.0.1:1"], ["weights"])  # neither has released any
    assert memory.is_released
    memory.resume([url], ["weights", "kv_cache"])
    assert not memory.is_released and server.info()["released"] == []
    server.control.post("/continue_generation")
    assert server.generate()
