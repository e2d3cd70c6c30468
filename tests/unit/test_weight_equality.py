import threading

import pytest
import torch

from colloid.engines.checksums import tensor_checksum
from colloid.engines.control import EngineControl
from colloid.errors import EngineError, WeightSyncError
from colloid.weights.check import check_weights
from colloid.weights.equality import check_equal


def test_equal_checksums_pass():
    check_equal({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, "engine")


def test_missing_extra_and_different_tensors_are_listed():
    with pytest.raises(WeightSyncError, match=r"1 missing \(a\); 1 extra \(d\); 1 different \(b\)"):
        check_equal({"a": "1", "b": "2", "c": "3"}, {"b": "0", "c": "3", "d": "4"}, "engine")


class Engine(EngineControl):
    """Answers once all are asked."""

    def __init__(self, url, asked, checksums):
        super().__init__(url)
        self.asked, self.checksums = asked, checksums

    def post(self, path, payload=None, *, timeout=None):
        self.asked.wait(10)
        if self.checksums is None:
            raise EngineError(f"{self.url} does not answer")
        return {"checksums": self.checksums}


def test_all_engines_are_asked_at_once_and_those_that_differ_are_named():
    tensors = {"a": torch.ones(3), "b": torch.zeros(2)}
    right = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}

    def check(*held):
        asked = threading.Barrier(len(held))
        engines = [Engine(f"http://engine:{row}", asked, checksums) for row, checksums in enumerate(held)]
        return check_weights(engines, "embedded", 3, iter(tensors.items()), 1 << 20)

    assert check(right, right, right) == 2
    with pytest.raises(WeightSyncError, match=r"engine:1.* 1 different \(b\)"):
        check(right, right | {"b": "0"})
    with pytest.raises(EngineError, match="engine:1 does not answer"):
        check(right, None)
