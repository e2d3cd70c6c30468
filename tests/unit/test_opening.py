"""The training data as the options name it: what a run gets of it does not depend on how it is read."""

from __future__ import annotations

import json

import pytest

from colloid import RolloutDataSource
from colloid.config import parse
from colloid.data.mixture import Mixture
from colloid.data.opening import load_dataset
from colloid.data.rows import PromptDataset
from colloid.data.stream import PromptStream
from colloid.errors import DataError

SFT = ["--loss-type", "sft_loss", "--input-key", "messages"]


@pytest.fixture
def data(tmp_path):
    """Forty prompts, of which three are bad and one is too long; each with a conversation."""
    rows = []
    for i in range(40):
        ask, say = {"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": str(i + 1)}
        rows.append({"prompt": f"{i} + 1" if i % 15 else None, "label": str(i + 1), "messages": [ask, say]})
    rows[7]["prompt"] = "7 " * 90
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def open_with(data, model, *argv):
    """(the data set, the samples of two of its epochs)"""
    fixed = ["--hf-checkpoint", str(model), "--device", "cpu", "--dry-run", "--rollout-max-prompt-len", "40"]
    args = parse([*fixed, "--prompt-data", *map(str, data), *argv])
    dataset = load_dataset(args)
    source = RolloutDataSource(args, dataset)
    try:
        groups = source.get_samples(72)
    finally:
        if not isinstance(dataset, PromptDataset):
            dataset.close()
    return dataset, [(group[0].prompt, group[0].tokens, group[0].label) for group in groups]


def test_streamed_in_workers_or_in_memory_it_is_the_same(data, tiny_model_dir):
    model, skip = tiny_model_dir(), "--skip-bad-rows"
    dataset, expected = open_with([data], model, skip)
    assert len(dataset) == 36 and (dataset.num_bad, dataset.num_filtered) == (3, 1)
    streamed, found = open_with([data], model, skip, "--streaming-data", "--num-data-workers", "2")
    assert isinstance(streamed, PromptStream) and found == expected and len(streamed) == 40
    parts = [f"{data}@[:9]", f"{data}@[9:]"]
    assert open_with(parts, model, skip, "--num-data-workers", "1")[1] == expected
    shuffled = open_with(parts, model, skip, "--streaming-data", "--rollout-shuffle")[1]
    assert shuffled != expected and sorted(shuffled[:36]) == sorted(shuffled[36:]) == sorted(expected[:36])
    for streaming in ([], ["--streaming-data"]):
        mixed, drawn = open_with(parts, model, skip, *streaming, "--prompt-data-weights", "9", "1")
        assert isinstance(mixed, Mixture) and sum(int(label) <= 9 for _, _, label in drawn) > 45
        assert len(mixed) == (40 if streaming else 36)


def test_conversations_stream_too(data, tiny_model_dir):
    expected = open_with([data], tiny_model_dir(), *SFT)[1]
    assert expected[3][0][1] == {"role": "assistant", "content": "4"}
    assert open_with([data], tiny_model_dir(), *SFT, "--streaming-data")[1] == expected


def test_a_bad_row_among_the_first_ends_the_run_before_it_starts(data, tiny_model_dir):
    for more in ([], ["--streaming-data"]):
        with pytest.raises(DataError, match="d.jsonl:1: 'prompt' must be a text or a list of messages"):
            open_with([data], tiny_model_dir(), *more)
