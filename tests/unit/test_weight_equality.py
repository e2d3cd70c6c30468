import pytest

from colloid.errors import WeightSyncError
from colloid.weights.equality import check_equal


def test_equal_checksums_pass():
    check_equal({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, "engine")


def test_missing_extra_and_different_tensors_are_listed():
    with pytest.raises(WeightSyncError, match=r"1 missing \(a\); 1 extra \(d\); 1 different \(b\)"):
        check_equal({"a": "1", "b": "2", "c": "3"}, {"b": "0", "c": "3", "d": "4"}, "engine")
