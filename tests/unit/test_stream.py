"""Streamed and weighted data: every row once an epoch, exact resumes, the same order with workers, flat memory."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid import RolloutDataSource
from colloid.config.prompt_files import parse_prompt_file
from colloid.data.files import Columns
from colloid.data.mixture import Mixture, Shuffled
from colloid.data.reading import Inline, make_pool
from colloid.data.rows import PromptDataset, PromptRow
from colloid.data.stream import PromptStream
from colloid.errors import CheckpointError, DataError
from tests.data_processors import Numbers

MiB = 2**20


def usable(numbers):
    return [str(n) for n in numbers if n % 11 != 10 and n % 7 != 6]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Numbers 0 to 1199 in each format, and 5000 to 5009."""
    root = tmp_path_factory.mktemp("numbers")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": range(1200)}), root / "d.parquet", row_group_size=500)
    (root / "d.jsonl").write_text("".join(json.dumps({"prompt": n}) + "\n" for n in range(1200)))
    (root / "few.jsonl").write_text("".join(json.dumps({"prompt": n}) + "\n" for n in range(5000, 5010)))
    return root


def stream(root, *names, shuffle=True, window=100, seed=3, pool=None, skip=True):
    files = [parse_prompt_file(f"{root}/{name}") for name in names]
    pool = pool or Inline(Numbers())
    return PromptStream(files, Numbers(), pool, seed=seed, shuffle=shuffle, window=window, skip_bad_rows=skip)


def take(source, count):
    return [source.next_row().prompt for _ in range(count)]


def test_every_usable_row_comes_once_an_epoch_shuffled_within_windows(paths):
    expected = usable([*range(1200), *range(5000, 5010)])
    assert take(stream(paths, "d.jsonl", "few.jsonl", shuffle=False), 2 * len(expected)) == expected * 2
    both = [take(stream(paths, name, "few.jsonl"), 2 * len(expected)) for name in ("d.jsonl", "d.parquet")]
    assert both[0] == both[1]
    first, second = both[0][: len(expected)], both[0][len(expected) :]
    assert Counter(first) == Counter(second) == Counter(expected) and first != second != expected
    places = [int(prompt) // 100 for prompt in first[:-10]]
    assert places == sorted(places) and first[:50] != sorted(first[:50], key=int)
    assert take(stream(paths, "d.jsonl", seed=4), 50) != first[:50]


def test_what_is_left_out_is_counted_and_the_epoch_told(paths):
    source = stream(paths, "d.jsonl@[:77]", shuffle=False)
    assert len(source) == 77 and source.epoch == 0
    take(source, len(usable(range(77))) + 1)
    assert source.metrics() == {"data/num_bad_rows": 7.0, "data/num_long_rows": 10.0, "data/epoch": 1.0}


def test_bad_rows_and_epochs_without_rows_are_errors(paths):
    with pytest.raises(DataError, match="d.jsonl:11: eleven"):
        take(stream(paths, "d.jsonl", shuffle=False, skip=False), 20)
    with pytest.raises(DataError, match="d.jsonl:11: eleven"):
        stream(paths, "d.jsonl", skip=False).head()
    with pytest.raises(DataError, match="no row of 1 is left: 1 are bad"):
        stream(paths, "d.jsonl@[10:11]").next_row()
    with pytest.raises(DataError, match="all 1 prompts are longer"):
        stream(paths, "d.jsonl@[6:7]").next_row()
    with pytest.raises(DataError, match="no rows"):
        stream(paths, "d.jsonl@[9:9]").next_row()
    with pytest.raises(DataError, match="no column 'prompt'"):
        pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), paths / "x.parquet")
        stream(paths, "x.parquet")


KINDS = {
    "jsonl": lambda root: stream(root, "d.jsonl@[-170:]", "few.jsonl", window=64),
    "parquet": lambda root: stream(root, "d.parquet@[450:560]", "few.jsonl", "d.parquet@[3:40]", window=64),
    "one window": lambda root: stream(root, "few.jsonl", window=1000),
    "windows of one": lambda root: stream(root, "few.jsonl", window=1),
    "in order": lambda root: stream(root, "d.parquet@[:150]", shuffle=False),
    "mixture": lambda root: Mixture(
        [stream(root, "d.parquet@[450:560]", window=32), stream(root, "few.jsonl")], [1, 3], seed=1
    ),
    "memory": lambda root: Mixture(
        [Shuffled(in_memory(size), seed=2, shuffle=True) for size in (40, 3)], [2.0, 0.5], seed=1
    ),
}


def in_memory(size):
    rows = [PromptRow(f"{size}-{i}", np.zeros(1, np.int32), None, {}, i) for i in range(size)]
    return PromptDataset("d", rows, 0, str(size))


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), stops=st.lists(st.integers(0, 120), min_size=1, max_size=4))
def test_a_resume_at_any_row_goes_on_with_the_next(paths, kind, stops):
    expected = take(KINDS[kind](paths), sum(stops) + 30)
    source, found = KINDS[kind](paths), []
    for count in stops:
        found += take(source, count)
        state = json.loads(json.dumps(source.state()))
        metrics = source.metrics()
        source = KINDS[kind](paths)
        source.load_state(state)
        if kind not in ("memory", "mixture"):
            assert {**source.metrics(), "data/epoch": 0} == {**metrics, "data/epoch": 0}
    assert found + take(source, 30) == expected


def test_workers_keep_order_and_state_whatever_they_read_ahead(paths):
    expected = take(stream(paths, "d.parquet"), 2500)
    pool = make_pool(Numbers(), 2)
    try:
        source = stream(paths, "d.parquet", pool=pool)
        found = take(source, 777)
        state = source.state()
        resumed = stream(paths, "d.parquet", pool=pool)
        resumed.load_state(state)
        assert found + take(resumed, 2500 - 777) == expected
    finally:
        resumed.close()
    assert not pool.pids()


def test_changed_data_goes_on_at_the_same_row(paths, tmp_path):
    lines = [json.dumps({"prompt": n}) + "\n" for n in range(300)]
    (tmp_path / "d.jsonl").write_text("".join(lines))
    source = stream(tmp_path, "d.jsonl", shuffle=False)
    taken = take(source, 180)
    (tmp_path / "d.jsonl").write_text("".join(line.replace("{", "{   ") for line in lines))
    changed = stream(tmp_path, "d.jsonl", shuffle=False)
    assert changed.fingerprint != source.fingerprint
    changed.load_state(source.state())
    assert taken + take(changed, 50) == usable(range(300))[:230]


def test_a_mixture_draws_by_weight_and_each_source_has_its_epochs(paths):
    def make(seed=1):
        return Mixture([stream(paths, "d.parquet"), stream(paths, "few.jsonl")], [3, 1], seed=seed)

    prompts = take(make(), 4000)
    small = [prompt for prompt in prompts if int(prompt) >= 5000]
    assert abs(len(small) - 1000) < 100
    few = usable(range(5000, 5010))
    for first in range(0, len(small) - len(few), len(few)):
        assert set(small[first : first + len(few)]) == set(few)
    assert take(make(), 4000) == prompts != take(make(2), 4000)
    assert len(make()) == 1210


def make_args(samples=2):
    return SimpleNamespace(n_samples_per_prompt=samples, rollout_shuffle=True, rollout_seed=5)


def test_a_source_on_a_stream_resumes_what_was_in_flight_and_then_the_next_row(paths):
    def prompts(groups):
        return [(group[0].group_index, group[0].index, group[0].prompt) for group in groups]

    straight = RolloutDataSource(make_args(), KINDS["mixture"](paths))
    expected = prompts(straight.get_samples(90))
    source = RolloutDataSource(make_args(), KINDS["mixture"](paths))
    source.mark_consumed(source.get_samples(30))
    source.get_samples(10)
    resumed = RolloutDataSource(make_args(), KINDS["mixture"](paths))
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert prompts(resumed.get_samples(60)) == expected[30:]
    assert [row.prompt for row in KINDS["mixture"](paths).sample(90)] == [prompt for _, _, prompt in expected]
    with pytest.raises(CheckpointError, match="streamed or weighted: go on with the options"):
        RolloutDataSource(make_args(), in_memory(4)).load_state_dict(source.state_dict())
    with pytest.raises(CheckpointError, match="was in memory, and now it is streamed"):
        source.load_state_dict(RolloutDataSource(make_args(), in_memory(4)).state_dict())


def write_big(path, megabytes):
    """A file of about so many MiB, in rows of about 4 KiB of text that does not compress."""
    filler = random.Random(0).randbytes(2**20).hex()
    rows = megabytes * 256

    def text(number):
        start = number * 37 % 2_000_000
        return filler[start : start + 4000]

    if path.suffix == ".jsonl":
        with open(path, "w") as file:
            for number in range(rows):
                file.write(f'{{"prompt": {number}, "text": "{text(number)}"}}\n')
        return rows
    schema = pyarrow.schema({"prompt": pyarrow.int64(), "text": pyarrow.string()})
    group = min(2**16, rows // 5)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, rows, group):
            numbers = range(first, min(rows, first + group))
            writer.write_table(pyarrow.table({"prompt": numbers, "text": list(map(text, numbers))}, schema=schema))
    return rows


class WithText(Numbers):
    columns = Columns((("prompt", "--input-key"), ("text", "--label-key")))


def growth(path, rows):
    """MiB by which this process grows from the first tenth of the file to its end, at most; reads one epoch."""
    options = {"seed": 1, "shuffle": True, "window": 1024, "skip_bad_rows": True}
    source = PromptStream([parse_prompt_file(str(path))], WithText(), Inline(WithText()), **options)
    gc.collect()
    pyarrow.default_memory_pool().release_unused()  # what writing the file took
    process, sizes, seen = psutil.Process(), [], 0
    for number in range(rows):
        source.next_row()
        if source.epoch:
            break
        seen += 1
        if number % 1000 == 0:
            sizes.append(process.memory_info().rss / MiB)
    assert seen == sum(1 for n in range(rows) if n % 11 != 10 and n % 7 != 6)
    settled = max(sizes[: max(2, len(sizes) // 10)])
    print(f"{path.name}: {os.path.getsize(path) / MiB:.0f} MiB, {rows} rows, RSS {settled:.0f} to {max(sizes):.0f} MiB")
    return max(sizes) - settled


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_memory_is_flat_while_a_file_streams(tmp_path, suffix):
    path = tmp_path / f"d.{suffix}"
    assert growth(path, write_big(path, 64)) < 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_memory_is_flat_while_5_gb_stream(tmp_path, suffix):
    """Written by another process, so that what this one holds is what reading takes."""
    path = tmp_path / f"d.{suffix}"
    code = (
        "import sys, pathlib; from tests.unit.test_stream import write_big; write_big(pathlib.Path(sys.argv[1]), 5120)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2], check=True)
    assert growth(path, 5120 * 256) < 40
    path.unlink()
