"""Data files: formats, slices, bad rows and columns, worker processes; every way gives the same rows."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.config.prompt_files import PromptFile, parse_prompt_file
from colloid.data.files import Columns, RawRow, open_rows
from colloid.data.prompts import PromptFormat, PromptProcessor, load_prompts
from colloid.data.reading import Chunk, LoadOptions, in_order
from colloid.data.workers import DataWorkers
from colloid.errors import ConfigError, DataError
from tests.data_processors import Slow
from tests.tiny import make_tiny_tokenizer

NUM_ROWS = 700


def table(num_rows=NUM_ROWS):
    return {
        "prompt": [f"What is {i} + 1?" for i in range(num_rows)],
        "label": [str(i + 1) for i in range(num_rows)],
        "unused": [b"\x00" * 20] * num_rows,
        "metadata": [{"level": i % 3} for i in range(num_rows)],
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The same rows in each format; `split` is a directory with a split `train`."""
    root = tmp_path_factory.mktemp("data")
    columns = table()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    lines = [json.dumps({key: value for key, value in row.items() if key != "unused"}) for row in rows]
    lines.insert(3, "  ")  # an empty line is no row
    (root / "d.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.table(columns), root / "d.parquet", row_group_size=150)
    for directory in ("saved", "split/train"):
        (root / directory).mkdir(parents=True)
        for number, (first, last) in enumerate([(0, 333), (333, NUM_ROWS)]):
            part = pyarrow.table(columns).slice(first, last - first)
            with pyarrow.ipc.new_stream(str(root / directory / f"data-{number}.arrow"), part.schema) as stream:
                stream.write_table(part, max_chunksize=100)
        files = [{"filename": f"data-{number}.arrow"} for number in range(2)]
        (root / directory / "state.json").write_text(json.dumps({"_data_files": files}))
    (root / "split" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return {"jsonl": root / "d.jsonl", "parquet": root / "d.parquet", "saved": root / "saved", "split": root / "split"}


def contents(dataset):
    return [(row.prompt, row.label, row.metadata, row.token_ids.tolist()) for row in dataset.rows]


def test_every_format_holds_the_same_rows_here_and_in_workers(paths, tokenizer):
    expected = load_prompts(paths["jsonl"], tokenizer, PromptFormat())
    assert [row.label for row in expected.rows] == table()["label"] and expected.rows[2].metadata == {"level": 2}
    assert [expected.rows[i].line for i in (2, 3)] == [3, 5]
    for name in ("parquet", "saved", "split"):
        found = load_prompts(paths[name], tokenizer, PromptFormat())
        assert contents(found) == contents(expected) and found.fingerprint == expected.fingerprint, name
    parts = [f"{paths['jsonl']}@[:200]", f"{paths['parquet']}@[200:-1]", f"{paths['saved']}@[-1:]"]
    found = load_prompts(parts, tokenizer, PromptFormat(), LoadOptions(num_workers=2))
    assert contents(found) == contents(expected) and found.fingerprint == expected.fingerprint


ENDS = st.one_of(st.none(), st.integers(-NUM_ROWS - 5, NUM_ROWS + 5))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(["jsonl", "parquet", "saved", "split"]), start=ENDS, stop=ENDS, at=st.integers(0, NUM_ROWS))
def test_a_slice_is_that_of_python_and_goes_on_from_any_position(paths, name, start, stop, at):
    file, columns = PromptFile(str(paths[name]), start, stop), Columns((("label", "--label-key"),))
    expected = table()["label"][start:stop]

    def label(raw):
        return (raw.data if isinstance(raw.data, dict) else json.loads(raw.data))["label"]

    reader = open_rows(file, columns)
    first = [label(next(reader)) for _ in range(min(at, len(expected)))]
    position = json.loads(json.dumps(reader.position))
    rest = [label(row) for row in open_rows(file, columns, position)]
    assert first + rest == expected
    if name != "jsonl":
        assert set(position) == {"row"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl", PromptFile("a.jsonl")),
        ("a@[1:2]/b.jsonl", PromptFile("a@[1:2]/b.jsonl")),
        ("a.jsonl@[:]", PromptFile("a.jsonl")),
        ("a.jsonl@[-10:]", PromptFile("a.jsonl", -10, None)),
        ("a b.parquet@[0:100]", PromptFile("a b.parquet", 0, 100)),
        ("x@[1:2]@[3: -4]", PromptFile("x@[1:2]", 3, -4)),
    ],
)
def test_a_name_is_a_path_and_perhaps_a_slice(text, expected):
    assert parse_prompt_file(text) == expected


@pytest.mark.parametrize("text", ["a.jsonl@[5]", "a.jsonl@[]", "a.jsonl@[::2]", "a.jsonl@[x:]", "@[1:2]"])
def test_what_is_no_slice_is_refused(text):
    with pytest.raises(ConfigError, match=r"is no slice of rows; write \[a:b\]"):
        parse_prompt_file(text)


def test_messages_and_objects_of_columns_are_those_of_json(tmp_path, tokenizer):
    """Arrow gives every message the keys of all others, null where they have none."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "1"})
    rows = [{"prompt": messages, "metadata": '{"a": 1}', "tools": '[{"type": "function"}]'}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    (row,) = load_prompts(tmp_path / "d.parquet", tokenizer, PromptFormat()).rows
    assert row.prompt == messages and row.metadata == {"a": 1, "tools": [{"type": "function"}]}
    assert row.where == f"{tmp_path}/d.parquet: row 0"


def test_bad_files_columns_and_rows_are_named(tmp_path, paths, tokenizer):
    def message(path, **options):
        with pytest.raises(DataError) as caught:
            load_prompts(path, tokenizer, PromptFormat(**options))
        return str(caught.value)

    for name in ("parquet", "saved"):
        text = message(paths[name], input_key="question")
        assert f"{paths[name]}: no column 'question'; there are 'prompt', 'label', 'unused', 'metadata'" in text
        assert "--input-key" in text
    assert "no column 'answer'" in message(paths["parquet"], label_key="answer", require_label=True)
    (tmp_path / "broken.parquet").write_text("PAR1")
    assert "broken.parquet is no Parquet file" in message(tmp_path / "broken.parquet")
    (tmp_path / "d.csv").write_text("a,b")
    assert "d.csv: this format cannot be read; give JSONL" in message(tmp_path / "d.csv")
    assert "is a directory without a state.json" in message(tmp_path)
    split = tmp_path / "split"
    split.mkdir()
    (split / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert f"has no split 'train'; name one of its splits: {split}/test" in message(split)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), tmp_path / "null.parquet")
    assert "null.parquet: row 1: 'prompt' must be a text" in message(tmp_path / "null.parquet")
    assert "the file has no rows" in message(f"{paths['jsonl']}@[5:5]")


def test_bad_rows_can_be_skipped_and_are_counted_with_an_example(tmp_path, tokenizer, caplog):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 3}\nnot JSON\n{"prompt": "b"}\n{"prompt": [{"role": "user"}]}\n')
    with caplog.at_level(logging.WARNING):
        dataset = load_prompts(path, tokenizer, PromptFormat(), LoadOptions(skip_bad_rows=True))
    assert [row.prompt for row in dataset.rows] == ["a", "b"]
    assert dataset.num_bad == 3 and dataset.metrics() == {"data/num_bad_rows": 3.0}
    assert "d.jsonl:2: 'prompt' must be a text" in caplog.text and "3 of 5 rows are bad" in caplog.text
    lines = path.read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join(["", *lines[1:3], lines[4]]))
    with pytest.raises(DataError, match="no row of 3 is left: 3 are bad .*bad.jsonl:2"):
        load_prompts(tmp_path / "bad.jsonl", tokenizer, PromptFormat(), LoadOptions(skip_bad_rows=True))


def test_workers_keep_the_order_come_back_and_can_be_killed(tmp_path):
    def rows(data, number=0):
        return [RawRow("d.jsonl", number, data)]

    pool = DataWorkers(Slow(), 2)
    try:
        futures = [pool.submit(rows(b"x" * 200_000, number)) for number in range(8)]
        answers = [future.result(timeout=60)[0] for future in futures]
        assert [number for number, _ in answers] == list(range(8))
        assert len({pid for _, pid in answers}) <= 2 and os.getpid() not in {pid for _, pid in answers}
        assert pool.submit(rows(f"once {tmp_path}/x".encode(), 9)).result(timeout=60)[0][0] == 9
        with pytest.raises(DataError, match=r"ended \(exit status -9\) while it read the rows d.jsonl:7 .*, twice"):
            pool.submit(rows(b"die", 7)).result(timeout=60)
        asleep = pool.submit(rows(b"sleep"))
        while not pool.pids():
            time.sleep(0.05)
        pids = pool.pids()
    finally:
        pool.close()
    with pytest.raises(DataError, match="closed"):
        asleep.result(timeout=10)
    assert pids and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_rows_that_are_long_in_work_are_named(monkeypatch, caplog):
    monkeypatch.setattr("colloid.data.reading.PATIENCE", 0.2)
    pool = DataWorkers(Slow(), 1)
    threading.Timer(1.0, pool.close).start()
    with pytest.raises(DataError, match="closed"):
        list(in_order([Chunk([RawRow("d.jsonl", 3, b"sleep")])], pool))
    assert "have not tokenised the rows d.jsonl:3 to d.jsonl:3 after 0.4 s" in caplog.text


def _lives(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_ends_with_its_parent_in_the_middle_of_a_chunk():
    code = (
        "from colloid.data.workers import DataWorkers; from colloid.data.files import RawRow\n"
        "from tests.data_processors import Slow; import os, signal\n"
        "pool = DataWorkers(Slow(), 1); pool.submit([RawRow('d', 0, b'x')]).result(timeout=60)\n"
        "pool.submit([RawRow('d', 0, b'sleep')]); print(*pool.pids(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=90)
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while _lives(int(ended.stdout)):
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)


def test_a_processor_survives_the_way_to_a_worker(tokenizer):
    processor = pickle.loads(pickle.dumps(PromptProcessor(tokenizer, PromptFormat(max_tokens=9))))
    lines = [b'{"prompt": "a"}', b'{"prompt": "%s"}' % (b"ab " * 99)]
    one, long = processor([RawRow("d.jsonl", number, line) for number, line in enumerate(lines)])
    assert one.row.prompt == "a" and long.length > 9
