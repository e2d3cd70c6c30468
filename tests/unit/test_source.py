"""The data source: whatever is taken, given back, saved and loaded, no prompt is skipped and none comes twice."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid import RolloutDataSource, RolloutDataSourceWithBuffer, Sample
from colloid.data.prompts import PromptDataset, PromptRow
from colloid.errors import CheckpointError, HookError


def make_dataset(size, name="d"):
    rows = [PromptRow(f"{name}{i}", np.asarray([i, 99], np.int32), str(i), {}, i + 1) for i in range(size)]
    return PromptDataset("d.jsonl", rows, 0, f"{name}{size}")


def make_args(shuffle=True, samples=2, seed=5):
    return SimpleNamespace(n_samples_per_prompt=samples, rollout_shuffle=shuffle, rollout_seed=seed)


def make_source(kind=RolloutDataSourceWithBuffer, size=5, **options):
    return kind(make_args(**options), make_dataset(size))


def reloaded(source, size=5, kind=None):
    """A new source with the state that the old one would save."""
    fresh = type(source)(source.args, make_dataset(size))
    fresh.load_state_dict(json.loads(json.dumps(source.state_dict())))
    return fresh


def finish(group, reward=1.0):
    for sample in group:
        sample.append_response_tokens([1, 2], log_probs=[-0.1, -0.2], weight_version=4)
        sample.status, sample.reward = Sample.Status.COMPLETED, reward


def test_a_group_is_copies_of_one_prompt_and_indices_go_on():
    groups = make_source(shuffle=False, samples=3).get_samples(2)
    assert [[s.index for s in group] for group in groups] == [[0, 1, 2], [3, 4, 5]]
    assert [group[0].group_index for group in groups] == [0, 1]
    assert [{s.prompt for s in group} for group in groups] == [{"d0"}, {"d1"}]
    assert groups[0][0].tokens == [0, 99] and groups[0][0].tokens is not groups[0][1].tokens
    assert groups[0][0].metadata is not groups[0][1].metadata


def test_exactly_n_groups_over_as_many_epochs_as_that_takes():
    groups = make_source(size=3).get_samples(11)
    assert len(groups) == 11
    for epoch in range(3):
        assert {g[0].prompt for g in groups[3 * epoch : 3 * epoch + 3]} == {"d0", "d1", "d2"}


def test_the_order_of_an_epoch_follows_from_seed_plus_epoch():
    def orders(seed):
        prompts = [group[0].prompt for group in make_source(size=20, seed=seed).get_samples(60)]
        return [prompts[i : i + 20] for i in (0, 20, 40)]

    assert orders(5) == orders(5)
    assert orders(5)[1] == orders(6)[0]
    assert orders(5)[0] != orders(5)[1]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.integers(1, 7)),
        st.tuples(st.just("train"), st.integers(0, 3)),
        st.tuples(st.just("give back"), st.integers(0, 3)),
        st.tuples(st.just("give back finished"), st.integers(0, 3)),
        st.tuples(st.just("reload"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.integers(1, 6), st.booleans())
def test_any_interleaving_trains_each_prompt_once_an_epoch_or_has_it_waiting(operations, size, shuffle):
    source = make_source(size=size, shuffle=shuffle)
    held, trained = [], []
    for name, number in operations:
        if name == "get":
            groups = source.get_samples(number)
            assert len(groups) == number
            held += groups
        elif name == "train":
            trained += [group[0].group_index for group in held[:number]]
            source.mark_consumed(held[:number])
            del held[:number]
        elif name.startswith("give back"):
            if name.endswith("finished"):
                for group in held[:number]:
                    if group[0].reward is None:
                        finish(group)
            source.add_samples(held[:number])
            del held[:number]
        else:
            source, held = reloaded(source, size), []
    drawn = source.group_index
    waiting = [group[0].group_index for group in [*source.buffer, *source._returned, *held]]
    assert sorted(trained + waiting) == list(range(drawn))
    assert drawn == source.epoch * size + source.offset


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 7), st.integers(1, 5), st.booleans())
def test_a_resume_at_any_point_equals_the_straight_run(takes, stop, size, in_flight):
    """`in_flight`: what was taken last was not trained when the checkpoint was made, and is taken again."""

    def ids(groups):
        return [[(s.index, s.group_index, s.prompt) for s in group] for group in groups]

    straight = make_source(size=size)
    expected = [ids(straight.get_samples(count)) for count in takes]
    source = make_source(size=size)
    seen = []
    for number, count in enumerate(takes):
        groups = source.get_samples(count)
        if number == stop:
            if not in_flight:
                source.mark_consumed(groups)
            source = reloaded(source, size)
            if in_flight:
                groups = source.get_samples(count)
        source.mark_consumed(groups)
        seen.append(ids(groups))
    assert seen == expected


def test_the_buffer_goes_first_and_finished_groups_come_back_as_recorded():
    source = make_source(size=9, shuffle=False)
    first, second, third = source.get_samples(3)
    finish(second)
    third[0].append_response_tokens([7], log_probs=[-1.0])
    third[0].status = Sample.Status.ABORTED
    recorded = [sample.to_dict() for sample in second]
    source.mark_consumed([first])
    source.add_samples([second, third])
    source = reloaded(source, 9)
    groups = source.get_samples(3)
    assert [sample.to_dict() for sample in groups[0]] == recorded
    assert [group[0].prompt for group in groups] == ["d1", "d2", "d3"]
    assert groups[1][0].tokens == [2, 99] and groups[1][0].status is Sample.Status.PENDING


def test_a_group_with_one_unfinished_sample_starts_anew_as_a_whole():
    source = make_source(size=3)
    (group,) = source.get_samples(1)
    finish(group[:1])
    source.add_samples([group])
    (again,) = source.get_samples(1)
    assert [(s.response_length, s.reward) for s in again] == [(0, None), (0, None)]


def test_a_source_without_a_buffer_keeps_nothing():
    source = make_source(RolloutDataSource, size=4, shuffle=False)
    source.add_samples(source.get_samples(2))
    assert [group[0].prompt for group in source.get_samples(2)] == ["d2", "d3"]
    assert [group[0].prompt for group in reloaded(source, 4).get_samples(2)] == ["d2", "d3"]


def test_exactly_the_groups_that_the_filter_returns_leave_the_buffer():
    class Newest(RolloutDataSourceWithBuffer):
        def buffer_filter(self, args, buffer, num_samples):
            chosen = buffer[-1:]
            buffer.clear()
            return chosen

    source = make_source(Newest, size=9, shuffle=False)
    source.add_samples(source.get_samples(3))
    assert [group[0].prompt for group in source.get_samples(2)] == ["d2", "d3"]
    assert [group[0].prompt for group in source.buffer] == ["d0", "d1"]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (lambda buffer, n: [list(group) for group in buffer[:n]], "not in the buffer"),
        (lambda buffer, n: buffer[: n + 1], "returned 2 groups"),
        (lambda buffer, n: [buffer[0]] * 2, "returned 2 groups"),
    ],
)
def test_a_filter_that_returns_something_else_is_an_error(chosen, message):
    source = RolloutDataSourceWithBuffer(make_args(), make_dataset(9), buffer_filter=lambda _id, b, n: chosen(b, n))
    source.add_samples(source.get_samples(3))
    with pytest.raises(HookError, match=message):
        source.get_samples(1)


def test_a_subclass_that_calls_no_constructor_works_saves_and_loads(tmp_path):
    class Own(RolloutDataSource):
        def __init__(self):
            self.dataset = iter("abc")

        def get_samples(self, num_samples):
            return [[Sample(prompt=next(self.dataset), index=i)] for i in range(num_samples)]

    source = Own()
    assert source.get_samples(1)[0][0].prompt == "a" and len(source) == 0
    source.checkpoint_dir = str(tmp_path)
    source.save(3)
    source.load(3)


def test_changed_data_is_said_on_resume(caplog):
    state = make_source(size=4).state_dict()
    make_source(size=5).load_state_dict(state)
    assert "not the data that the checkpoint was made with" in caplog.text


def test_a_state_that_json_cannot_hold_is_named(tmp_path):
    source = make_source()
    (group,) = source.get_samples(1)
    group[0].metadata["x"] = object()
    source.add_samples([group])
    source.checkpoint_dir = str(tmp_path)
    with pytest.raises(CheckpointError, match="what JSON cannot"):
        source.save(0)
    with pytest.raises(CheckpointError, match="no data source state"):
        make_source().load(0)


def test_every_group_in_flight_is_counted_once():
    source = make_source(size=6)
    source.get_samples(4)
    counts = Counter(group[0]["group_index"] for group in source.state_dict()["in_flight"])
    assert counts == Counter(range(4))
