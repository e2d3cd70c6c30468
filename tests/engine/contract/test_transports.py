"""Every way of weights, many times: the engine holds what was sent, memory stays flat, a failed update is made good."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from colloid.engines.control import EngineControl
from colloid.errors import EngineError, WeightSyncError
from colloid.weights.check import check_weights
from colloid.weights.senders import SendOptions, WeightSender
from colloid.weights.transports import make_sender
from tests.engine.contract.conftest import KEY

pytestmark = pytest.mark.timeout(900)  # of the first test, most of it for the start of SGLang
NUM_SYNCS = 20
BUCKET_BYTES = 1 << 16
WAYS = {"tensor": ("tensor", "full"), "gloo": ("gloo", "full"), "disk": ("disk", "full"), "delta": ("disk", "delta")}
PARTS = {
    "tensor": "/update_weights_from_tensor",
    "gloo": "/update_weights_from_distributed",
    "disk": "/update_weights_from_disk",
    "delta": "/update_weights_from_disk",
}


def make(engine, way: str, place: Path) -> WeightSender:
    transport, mode = WAYS[way]
    return make_sender(
        SendOptions(transport, mode, BUCKET_BYTES, "retract", engine.model_dir, place, engine=engine.kind)
    )


def resident(pid: int) -> float:
    """MiB of a process and of those that it has started."""
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True))) / 2**20


@pytest.fixture
def tensors(engine, weights_place):
    """Those of the model; the engine has them again after the test."""
    original = load_file(engine.model_dir / "model.safetensors")
    yield {name: tensor.clone() for name, tensor in original.items()}
    with closing(make(engine, "disk", weights_place)) as sender:
        sender.send([engine.control], 0, iter(original.items()))


@pytest.mark.parametrize("way", WAYS)
def test_after_each_of_many_syncs_the_engine_holds_the_senders_tensors_and_memory_is_flat(
    engine, way, tensors, weights_place
):
    sizes = []
    with closing(make(engine, way, weights_place)) as sender:
        for version in range(100, 100 + NUM_SYNCS):
            for tensor in tensors.values():
                tensor.view(-1)[version % 7 :: 50] += 0.01
            assert sender.send([engine.control], version, iter(tensors.items())).num_tensors == len(tensors)
            check_weights([engine.control], engine.kind, version, iter(tensors.items()), BUCKET_BYTES)
            assert engine.call("GET", "/model_info").json()["weight_version"] == str(version)
            sizes.append(resident(engine.pid))
    assert sizes[-1] - sizes[5] < 32, f"resident memory grew (MiB): {sizes}"


class Failing(EngineControl):
    """An engine that a part of an update does not reach."""

    path = ""

    def post(self, path: str, payload: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        if path == self.path:
            raise EngineError("the connection broke")
        return super().post(path, payload, **options)


@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_fails_says_so_and_the_next_one_makes_it_good(engine, way, tensors, weights_place):
    control = Failing(engine.url, KEY)
    with closing(make(engine, way, weights_place)) as sender:
        sender.send([control], 200, iter(tensors.items()))
        for tensor in tensors.values():
            tensor.add_(0.01 * torch.ones_like(tensor))
        control.path = PARTS[way]
        with pytest.raises(WeightSyncError, match="1 of 1 engines failed: .*the connection broke"):
            sender.send([control], 201, iter(tensors.items()))
        control.path = ""
        sender.send([control], 201, iter(tensors.items()))
    check_weights([engine.control], engine.kind, 201, iter(tensors.items()), BUCKET_BYTES)


@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_a_killed_sender_has_left_open_does_not_keep_others_out(engine, way, tensors, weights_place):
    engine.post("/pause_generation", {"mode": "retract"})
    engine.post("/begin_weight_update", {"weight_version": "300"})
    with closing(make(engine, way, weights_place)) as sender:
        sender.send([engine.control], 301, iter(tensors.items()))
    check_weights([engine.control], engine.kind, 301, iter(tensors.items()), BUCKET_BYTES)
