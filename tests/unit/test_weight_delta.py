"""The encoding of what changed: exact, small, and refusing what no sender writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.engines import delta
from colloid.engines.checksums import ALGORITHMS, digest, raw_bytes
from colloid.engines.delta_files import DeltaWriter, Manifest
from colloid.errors import WeightSyncError


@pytest.mark.parametrize("encoding", delta.ENCODINGS)
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]),
    wide=st.booleans(),
    seed=st.integers(0),
)
def test_new_values_are_made_of_old_ones_and_blocks(encoding, count, share, wide, seed):
    random = np.random.default_rng(seed)
    kind = np.uint32 if wide else np.uint16
    old = random.integers(0, np.iinfo(kind).max, count, dtype=kind)
    new = np.where(random.random(count) < share, random.integers(0, np.iinfo(kind).max, count, dtype=kind), old)
    block = delta.encode(old, new, 5, encoding)
    assert (block is None) == bool((old == new).all())
    for each in (block, delta.encode_whole(new, 5)):
        if each is not None:
            made = old.copy()
            delta.apply(each, made, encoding)
            assert (made == new).all() and each.start == 5 and each.count == count


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, np.uint16), (torch.float32, np.uint32)])
@pytest.mark.parametrize("encoding", delta.ENCODINGS)
def test_one_percent_of_change_is_about_one_percent_of_the_bytes(encoding, dtype, kind):
    generator = torch.Generator().manual_seed(1)
    weights = (0.02 * torch.randn(1_000_000, generator=generator)).to(dtype)
    mask = torch.rand(weights.shape, generator=generator) < 0.01
    changed = torch.where(mask, (weights.float() * (1 + 2**-7)).to(dtype), weights)
    old, new = raw_bytes(weights).view(kind), raw_bytes(changed).view(kind)
    size = len(delta.encode(old, new, 0, encoding).data)
    assert 0.005 < size / weights.nbytes < 0.0155


def test_known_checksums():
    assert digest(b"abc", "adler32") == "024d0127"
    assert digest(b"abc", "blake3") == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert digest(b"", "xxh3-128") == "99aa06d3014798d86001c324468d497f"
    assert set(ALGORITHMS) == {"adler32", "blake3", "xxh3-128"}


@pytest.mark.parametrize("layout", ["sparse", "dense", "whole"])
def test_a_block_that_no_sender_wrote_is_refused(layout):
    old = np.arange(100, dtype=np.uint16)
    new = old.copy()
    new[:: 1 if layout == "dense" else 40] += 1
    block = delta.encode_whole(new, 0) if layout == "whole" else delta.encode(old, new, 0, "xor")
    assert block.layout == layout
    bad = [
        {"data": block.data[:-2]},
        {"data": b"zstd"},
        {"changed": block.changed + 1},
        {"changed": 0},
        {"layout": "other"},
        {"count": 99},
        {"changed": 1 << 60, "count": 1 << 60},
    ]
    if layout == "sparse":
        far = np.array([50, 60, 70], np.uint32)
        bad.append({"data": delta._pack([far, np.zeros(3, np.uint16)])})
    for change in bad:
        with pytest.raises(WeightSyncError):
            delta.apply(delta.Block(**{**vars(block), **change}), old.copy(), "xor")


def test_a_manifest_is_read_as_it_was_written_and_nothing_else(tmp_path):
    writer = DeltaWriter(tmp_path, "xor", "adler32")
    old, new = np.zeros(60, np.uint16), np.arange(60, dtype=np.uint16) // 59
    assert writer.add("a", "bfloat16", (6, 10), new.view(np.uint8), iter([delta.encode(old, new, 0, "xor")])) == 1
    assert writer.add("same", "bfloat16", (60,), old.view(np.uint8), iter([])) == 0
    manifest = writer.finish("3", "2")
    text = (tmp_path / "delta.json").read_text()
    assert Manifest.parse(text) == manifest and [tensor.name for tensor in manifest.tensors] == ["a"]
    body = json.loads(text)
    tensor, block = body["tensors"][0], body["tensors"][0]["blocks"][0]
    for bad in (
        body | {"format": 2},
        body | {"encoding": "zip"},
        body | {"checksum": "crc"},
        body | {"weight_version": 3},
        body | {"more": 1},
        body | {"tensors": [tensor | {"file": "../delta-00000.bin"}]},
        body | {"tensors": [tensor | {"dtype": "int8"}]},
        body | {"tensors": [tensor | {"shape": [2, -3]}]},
        body | {"tensors": [tensor | {"blocks": [block | {"count": 61}]}]},
        body | {"tensors": [tensor | {"blocks": [block, block]}]},
        body | {"tensors": [tensor | {"blocks": [block | {"offset": "0"}]}]},
        [body],
        None,
    ):
        with pytest.raises(WeightSyncError, match="manifest"):
            Manifest.parse(json.dumps(bad))
    with pytest.raises(WeightSyncError, match="manifest"):
        Manifest.parse(b"\xff\xfe{")
