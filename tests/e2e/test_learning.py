"""Each algorithm learns a small task from the command line; `benchmarks/learning.py` is what runs."""

import pytest

from benchmarks.learning import ALSO, CASES, LOSS, REWARD, first_and_last, run, write_task

USUAL = "gspo"
"""The one that every test run sees."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != USUAL)]
)
def test_it_learns(name, tmp_path):
    write_task(tmp_path)
    records, _ = run(tmp_path, name)
    first, last = first_and_last(records, CASES[name].metric)
    if CASES[name].metric == REWARD:
        assert first < 0.3 and last > 0.9
    else:
        assert last < (0.05 if CASES[name].metric == LOSS else 0.6) * first
    for metric in ALSO.get(name, ()):
        first, last = first_and_last(records, metric)
        assert last > first + 0.1
