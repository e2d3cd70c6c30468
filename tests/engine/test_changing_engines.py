"""Weights to engines that join, leave, die and hang while one sender goes on: every transport, three real engines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from colloid.engines.checksums import tensor_checksum
from colloid.engines.control import EngineControl
from colloid.errors import EngineError, WeightSyncError
from colloid.weights.equality import check_equal
from colloid.weights.senders import SendOptions, WeightSender
from colloid.weights.transports import make_sender
from tests.parallel.engine import embedded_engines

pytestmark = pytest.mark.timeout(120)
WAYS = {"tensor": ("tensor", "full"), "gloo": ("gloo", "full"), "disk": ("disk", "full"), "delta": ("disk", "delta")}
PROMPT = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
TIMEOUT = 20.0


@dataclass
class Engines:
    urls: list[str]
    pids: list[int]
    model: Path
    tensors: dict[str, torch.Tensor]
    place: Path
    version: int = 0

    def controls(self, rows: str, timeout: float = TIMEOUT) -> list[EngineControl]:
        return [EngineControl(self.urls["abc".index(row)], "key", timeout) for row in rows]

    def change(self) -> None:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for tensor in self.tensors.values():
            mask = torch.rand(tensor.shape, generator=generator) < 0.01
            tensor += mask * 0.01 * torch.randn(tensor.shape, generator=generator)

    def send(self, sender: WeightSender, rows: str, timeout: float = TIMEOUT):
        return sender.send(self.controls(rows, timeout), self.version, iter(self.tensors.items()))

    def check(self, rows: str) -> None:
        """They hold the sender's tensors and generate with them."""
        expected = {name: tensor_checksum(tensor) for name, tensor in self.tensors.items()}
        for control in self.controls(rows):
            check_equal(expected, control.post("/weights_checker", {"action": "checksum"})["checksums"], control.url)
            assert control.post("/generate", PROMPT)["meta_info"]["weight_version"] == str(self.version)

    def version_of(self, row: str) -> str:
        return self.controls(row)[0].get("/model_info")["weight_version"]


@pytest.fixture(scope="module")
def engines(tiny_model_dir, tmp_path_factory) -> Iterator[Engines]:
    model, place = tiny_model_dir("qwen3"), tmp_path_factory.mktemp("changing")
    with embedded_engines(dict.fromkeys("abc", model), place, "--weights-dir", str(place / "weights")) as urls:
        pids = [json.loads((place / f"ready_{row}.json").read_text())["pid"] for row in range(3)]
        yield Engines(list(urls.values()), pids, model, load_file(model / "model.safetensors"), place)


@contextmanager
def sending(engines: Engines, way: str, keep_files: bool = False) -> Iterator[WeightSender]:
    transport, mode = WAYS[way]
    place = engines.place / "weights"
    sender = make_sender(SendOptions(transport, mode, 60_000, "in_place", engines.model, place, keep_files=keep_files))
    try:
        yield sender
    finally:
        sender.close()


@pytest.mark.parametrize(
    ("way", "keep_files"), [*((way, False) for way in WAYS), ("disk", True), ("delta", True)], ids=str
)
def test_a_newcomer_gets_the_current_version_and_the_next_goes_to_all_that_are_there(engines, way, keep_files):
    with sending(engines, way, keep_files) as sender:
        for _ in range(2):
            engines.change()
            engines.send(sender, "ab")
        assert engines.version_of("c") != str(engines.version)
        engines.send(sender, "c")  # alone, while the others generate
        engines.check("abc")
        engines.change()
        sent = engines.send(sender, "abc")
        engines.check("abc")
        total = sum(tensor.nbytes for tensor in engines.tensors.values())
        assert (sent.num_bytes < 0.2 * total) == (way == "delta")
        engines.change()
        engines.send(sender, "cb")
        engines.check("bc")
        assert engines.version_of("a") == str(engines.version - 1)
        with pytest.raises(EngineError, match="in no group"):
            engines.controls("a")[0].post(
                "/destroy_weights_update_group", {"group_name": getattr(sender, "_name", "x")}
            )


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_hangs_is_named_in_time_and_the_others_go_on(engines, way):
    with sending(engines, way) as sender:
        engines.change()
        engines.send(sender, "abc")
        os.kill(engines.pids[1], signal.SIGSTOP)
        try:
            engines.change()
            begin = time.monotonic()
            with pytest.raises(WeightSyncError, match=engines.urls[1]):
                engines.send(sender, "abc", timeout=2.0)
            engines.change()
            engines.send(sender, "ac")
            engines.check("ac")
            assert time.monotonic() - begin < 60, "an engine that hangs has held up the others"
        finally:
            os.kill(engines.pids[1], signal.SIGCONT)
        engines.change()
        engines.send(sender, "abc")
        engines.check("abc")


def test_an_engine_that_is_killed_in_a_group_is_named_and_the_others_go_on(engines):
    """From here on there are two."""
    with sending(engines, "gloo") as sender:
        engines.change()
        engines.send(sender, "abc")
        os.kill(engines.pids[2], signal.SIGKILL)
        engines.change()
        with pytest.raises(WeightSyncError, match=engines.urls[2]):
            engines.send(sender, "abc")
        engines.send(sender, "ab")
        engines.check("ab")


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_is_gone_is_named_and_the_others_go_on(engines, way):
    with sending(engines, way) as sender:
        engines.change()
        with pytest.raises(WeightSyncError, match=engines.urls[2]):
            engines.send(sender, "abc")
        engines.send(sender, "ba")
        engines.check("ab")
