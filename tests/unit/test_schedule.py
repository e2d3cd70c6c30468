import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.data.columns import reward_values, to_columns
from colloid.data.packing import deal, pack_by_count, pack_by_tokens, split_packs
from colloid.data.sample import Sample, Status
from colloid.data.schedule import build_rank_batches, step_totals

lengths_lists = st.lists(st.integers(0, 50), max_size=40).map(np.asarray)


def make_batch(response_lengths, *, num_steps=1, prompt=2, failed=()):
    samples = [
        Sample(
            index=index,
            group_index=index // 2,
            tokens=list(range(prompt + length)),
            response_length=length,
            reward=float(index),
            status=Status.FAILED if index in failed else Status.COMPLETED,
        )
        for index, length in enumerate(response_lengths)
    ]
    rewards = reward_values(samples)
    return to_columns(samples, raw_rewards=rewards, rewards=rewards, num_steps=num_steps)


def assert_each_position_once(packs, count):
    assert sorted(position for pack in packs for position in pack.tolist()) == list(range(count))


@given(lengths=lengths_lists, size=st.integers(1, 9), multiple_of=st.integers(1, 5))
@settings(deadline=None)
def test_packing_by_count_keeps_the_size_and_every_sample(lengths, size, multiple_of):
    packs = pack_by_count(lengths, size, multiple_of)
    assert_each_position_once(packs, len(lengths))
    assert all(0 < len(pack) <= size for pack in packs)
    assert len(packs) % multiple_of == 0 or len(packs) == len(lengths)
    assert len(packs) < -(-len(lengths) // size) + multiple_of


@given(lengths=lengths_lists, max_tokens=st.integers(1, 60), multiple_of=st.integers(1, 5))
@settings(deadline=None)
def test_packing_by_tokens_keeps_the_budget_and_every_sample(lengths, max_tokens, multiple_of):
    packs = pack_by_tokens(lengths, max_tokens, multiple_of)
    assert_each_position_once(packs, len(lengths))
    assert all(len(pack) == 1 or lengths[pack].sum() <= max_tokens for pack in packs)
    assert all(len(pack) > 0 for pack in packs)
    assert len(packs) % multiple_of == 0 or len(packs) == len(lengths)


@given(lengths=lengths_lists.filter(len), max_tokens=st.integers(50, 200))
@settings(deadline=None)
def test_packing_by_tokens_needs_less_than_twice_the_least_number(lengths, max_tokens):
    assert len(pack_by_tokens(lengths, max_tokens)) <= max(1, 2 * int(lengths.sum()) // max_tokens + 1)


def test_packs_are_as_full_as_the_budget_demands_and_no_fuller():
    lengths = np.asarray([3, 9, 7, 1, 12])
    assert [pack.tolist() for pack in pack_by_tokens(lengths, max_tokens=10)] == [[4], [1, 3], [0, 2]]
    assert sorted(lengths[pack].sum() for pack in pack_by_tokens(lengths, max_tokens=18)) == [16, 16]


def test_where_equal_packs_would_exceed_the_budget_full_ones_are_split():
    lengths = np.asarray([3] * 9 + [5] * 8)
    assert len(pack_by_tokens(lengths, max_tokens=10)) == 7
    assert max(lengths[pack].sum() for pack in deal(lengths, 8)) > 10
    packs = pack_by_tokens(lengths, max_tokens=10, multiple_of=8)
    assert_each_position_once(packs, len(lengths))
    assert len(packs) == 8 and max(lengths[pack].sum() for pack in packs) == 10


@given(lengths=lengths_lists, count=st.integers(0, 50))
@settings(deadline=None)
def test_splitting_reaches_the_count_or_single_samples(lengths, count):
    packs = split_packs(pack_by_tokens(lengths, 60), lengths, count)
    assert_each_position_once(packs, len(lengths))
    assert all(len(pack) > 0 for pack in packs)
    assert len(packs) >= min(count, len(lengths))


@given(costs=lengths_lists, num_hands=st.integers(1, 8))
@settings(deadline=None)
def test_dealing_leaves_no_hand_empty_while_there_are_enough(costs, num_hands):
    hands = deal(costs, num_hands)
    assert_each_position_once(hands, len(costs))
    assert sum(len(hand) > 0 for hand in hands) == min(num_hands, len(costs))


def test_dealing_balances_costs():
    hands = deal(np.asarray([8, 7, 6, 5, 4, 3, 2, 1]), 2)
    assert [int(np.asarray([8, 7, 6, 5, 4, 3, 2, 1])[hand].sum()) for hand in hands] == [18, 18]


def test_bounds_below_one_are_errors():
    with pytest.raises(ValueError, match="micro-batch size is 0"):
        pack_by_count(np.asarray([1]), 0)
    with pytest.raises(ValueError, match="token budget of a micro-batch is 0"):
        pack_by_tokens(np.asarray([1]), 0)


def schedule_cases():
    return st.tuples(
        st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=24),
        st.integers(1, 4),
        st.integers(1, 3),
        st.one_of(st.tuples(st.integers(1, 5), st.none()), st.tuples(st.none(), st.integers(1, 40))),
    )


@given(schedule_cases())
@settings(max_examples=200, deadline=None)
def test_every_schedule_keeps_the_invariants(case):
    rows, num_ranks, num_steps, (micro_batch_size, max_tokens) = case
    rows = rows * num_steps
    lengths, gradient = [row[0] for row in rows], np.asarray([row[0] > 0 and row[1] for row in rows])
    batch = make_batch(lengths, num_steps=num_steps)
    ranks = build_rank_batches(
        batch, data_parallel_size=num_ranks, num_steps=num_steps, micro_batch_size=micro_batch_size,
        max_tokens=max_tokens, has_gradient=gradient,
    )  # fmt: skip
    assert len(ranks) == num_ranks
    trained, present = [], []
    for rank in ranks:
        samples = rank.samples
        filler = (samples.loss_weights == 0) & (samples.response_lengths > 0)
        present += samples.sample_ids[~filler].tolist()
        assert len(rank.micro_batches) == num_steps == len(rank.totals)
        for step, micro_batches in enumerate(rank.micro_batches):
            assert len(micro_batches) == len(ranks[0].micro_batches[step])
            for micro_batch in micro_batches:
                assert len(micro_batch) > 0
                real = micro_batch[~filler[micro_batch]]
                trained += samples.sample_ids[real].tolist()
                assert (samples.steps[real] == step).all()
                if micro_batch_size:
                    assert len(micro_batch) <= micro_batch_size
                else:
                    assert len(micro_batch) == 1 or samples.lengths[micro_batch].sum() <= max_tokens
    assert sorted(trained) == batch.sample_ids[gradient].tolist()
    assert sorted(present) == batch.sample_ids.tolist()


@given(schedule_cases())
@settings(max_examples=50, deadline=None)
def test_a_sum_over_the_ranks_is_the_sum_over_the_batch(case):
    rows, num_ranks, num_steps, (micro_batch_size, max_tokens) = case
    lengths = [row[0] for row in rows * num_steps]
    batch = make_batch(lengths, num_steps=num_steps)
    ranks = build_rank_batches(
        batch, data_parallel_size=num_ranks, num_steps=num_steps, micro_batch_size=micro_batch_size,
        max_tokens=max_tokens, has_gradient=batch.response_lengths > 0,
    )  # fmt: skip

    def loss(samples, rows):
        part = samples.select(rows)
        weights = np.repeat(part.loss_weights * (1 + part.sample_ids), part.response_lengths)
        return float((weights * part.loss_mask).sum())

    for step in range(num_steps):
        parts = [loss(rank.samples, rows) for rank in ranks for rows in rank.micro_batches[step]]
        assert sum(parts) == pytest.approx(loss(batch, np.flatnonzero(batch.steps == step)))


def test_too_few_samples_are_filled_up_with_masked_copies():
    batch = make_batch([5, 3])
    ranks = build_rank_batches(
        batch,
        data_parallel_size=3,
        num_steps=1,
        micro_batch_size=4,
        max_tokens=None,
        has_gradient=np.asarray([True, False]),
    )
    chosen = [rank.samples.select(rank.micro_batches[0][0]) for rank in ranks]
    fillers = [samples for samples in chosen if samples.sample_ids[0] != 0]
    assert len(fillers) == 2
    for filler in fillers:
        assert filler.loss_mask.sum() == 0 and filler.loss_weights.tolist() == [0.0]
        assert filler.sample_ids.tolist() == [1] and filler.response_lengths.tolist() == [3]
    assert batch.loss_mask.all()


def test_a_step_without_any_gradient_has_no_micro_batch():
    batch = make_batch([5, 3, 4, 4], num_steps=2)
    ranks = build_rank_batches(
        batch, data_parallel_size=2, num_steps=2, micro_batch_size=1, max_tokens=None,
        has_gradient=np.asarray([False, False, True, True]),
    )  # fmt: skip
    assert [[len(micro_batches) for micro_batches in rank.micro_batches] for rank in ranks] == [[0, 1], [0, 1]]


def test_ranks_get_about_equal_tokens():
    rng = np.random.default_rng(0)
    batch = make_batch(rng.integers(10, 500, size=256).tolist())
    ranks = build_rank_batches(
        batch,
        data_parallel_size=4,
        num_steps=1,
        micro_batch_size=None,
        max_tokens=2048,
        has_gradient=np.ones(256, bool),
    )
    tokens = [int(rank.samples.lengths.sum()) for rank in ranks]
    assert max(tokens) < 1.05 * min(tokens)


def test_totals_count_no_failed_rollout():
    batch = make_batch([5, 3, 4, 0], num_steps=2, failed={1})
    totals = step_totals(batch, 2)
    assert [(total.num_rollouts, total.num_tokens) for total in totals] == [(1, 5), (2, 4)]


def test_a_schedule_with_both_bounds_or_a_wrong_step_is_an_error():
    batch = make_batch([5, 3])
    common = {"data_parallel_size": 1, "has_gradient": np.ones(2, bool)}
    with pytest.raises(ValueError, match="one of micro_batch_size"):
        build_rank_batches(batch, num_steps=1, micro_batch_size=1, max_tokens=1, **common)
    with pytest.raises(ValueError, match=r"has the steps \[0\], and num_steps is 0"):
        build_rank_batches(batch, num_steps=0, micro_batch_size=1, max_tokens=None, **common)
