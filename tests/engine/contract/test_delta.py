"""Weights as deltas: the embedded engine applies them, SGLang reads the copy that the trainer keeps."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from colloid.weights.check import check_weights
from colloid.weights.senders import SendOptions
from colloid.weights.transports import make_sender

pytestmark = pytest.mark.timeout(300)


def test_an_engine_holds_what_a_delta_makes(engine, weights_place):
    original = load_file(engine.model_dir / "model.safetensors")
    changed = {name: tensor.clone() for name, tensor in original.items()}
    for tensor in changed.values():
        tensor.view(-1)[::100] += 0.01
    options = SendOptions("disk", "delta", 1 << 16, "retract", engine.model_dir, weights_place, engine=engine.kind)
    sender = make_sender(options)
    sent = []
    try:
        for version, tensors in enumerate((original, changed, original), 31):
            sent.append(sender.send([engine.control], version, iter(tensors.items())))
            check_weights([engine.control], engine.kind, version, iter(tensors.items()), 1 << 16)
            assert engine.call("GET", "/model_info").json()["weight_version"] == str(version)
    finally:
        sender.close()
    total = sum(tensor.nbytes for tensor in original.values())
    assert sent[0].num_bytes == total and max(each.num_bytes for each in sent[1:]) < 0.15 * total
