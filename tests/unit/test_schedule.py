import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.data.columns import reward_values, to_columns
from colloid.data.sample import Sample, Status
from colloid.data.schedule import Bounds, build_rank_batches, step_totals


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


@st.composite
def schedule_cases(draw):
    """(rows: (response length, has a gradient), ranks, steps, bounds, whether to balance by operations)."""
    rows = draw(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=24))
    num_ranks, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    length_multiple = draw(st.sampled_from([1, 4]))
    if draw(st.booleans()):
        max_tokens = draw(st.integers(1, 40))
        larger = draw(st.none() | st.integers(max_tokens, 80))
        bounds = Bounds(max_tokens=max_tokens, log_probs_max_tokens=larger, length_multiple=length_multiple)
    else:
        bounds = Bounds(micro_batch_size=draw(st.integers(1, 5)), length_multiple=length_multiple)
    return rows * num_steps, num_ranks, num_steps, bounds, draw(st.booleans())


def assert_within_budget(samples, rows, max_tokens, bounds):
    assert len(rows) == 1 or bounds.padded(samples.lengths[rows]).sum() <= max_tokens


@given(schedule_cases())
@settings(max_examples=300, deadline=None)
def test_every_schedule_keeps_the_invariants(case):
    rows, num_ranks, num_steps, bounds, by_flops = case
    lengths, gradient = [row[0] for row in rows], np.asarray([row[0] > 0 and row[1] for row in rows])
    batch = make_batch(lengths, num_steps=num_steps)
    costs = batch.lengths * 10 + batch.lengths**2 if by_flops else None
    ranks = build_rank_batches(
        batch, data_parallel_size=num_ranks, num_steps=num_steps, bounds=bounds, has_gradient=gradient, costs=costs
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
                if bounds.micro_batch_size:
                    assert len(micro_batch) <= bounds.micro_batch_size
                else:
                    assert_within_budget(samples, micro_batch, bounds.max_tokens, bounds)
    assert sorted(trained) == batch.sample_ids[gradient].tolist()
    assert sorted(present) == batch.sample_ids.tolist()


@given(schedule_cases())
@settings(max_examples=200, deadline=None)
def test_packs_for_log_probs_hold_the_same_rows_within_their_own_budget(case):
    rows, num_ranks, num_steps, bounds, _ = case
    batch = make_batch([row[0] for row in rows], num_steps=num_steps)
    ranks = build_rank_batches(
        batch, data_parallel_size=num_ranks, num_steps=num_steps, bounds=bounds,
        has_gradient=batch.response_lengths > 0,
    )  # fmt: skip
    for rank in ranks:
        if bounds.log_probs_max_tokens is None:
            assert rank.log_prob_micro_batches == []
            continue
        for step, (packs, trained) in enumerate(zip(rank.log_prob_micro_batches, rank.micro_batches, strict=True)):
            assert len(packs) == len(ranks[0].log_prob_micro_batches[step]) <= len(trained)
            assert sorted(row for pack in packs for row in pack) == sorted(row for pack in trained for row in pack)
            for pack in packs:
                assert len(pack) > 0
                assert_within_budget(rank.samples, pack, bounds.log_probs_max_tokens, bounds)


def test_a_larger_budget_makes_fewer_passes():
    batch = make_batch([10] * 32)
    ranks = build_rank_batches(
        batch, data_parallel_size=2, num_steps=1, bounds=Bounds(max_tokens=24, log_probs_max_tokens=100),
        has_gradient=np.ones(32, bool),
    )  # fmt: skip
    assert [len(rank.micro_batches[0]) for rank in ranks] == [8, 8]
    assert [len(rank.log_prob_micro_batches[0]) for rank in ranks] == [2, 2]


@given(schedule_cases())
@settings(max_examples=50, deadline=None)
def test_a_sum_over_the_ranks_is_the_sum_over_the_batch(case):
    rows, num_ranks, num_steps, bounds, _ = case
    batch = make_batch([row[0] for row in rows], num_steps=num_steps)
    ranks = build_rank_batches(
        batch, data_parallel_size=num_ranks, num_steps=num_steps, bounds=bounds,
        has_gradient=batch.response_lengths > 0,
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
        bounds=Bounds(micro_batch_size=4),
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
        batch, data_parallel_size=2, num_steps=2, bounds=Bounds(micro_batch_size=1),
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
        bounds=Bounds(max_tokens=2048),
        has_gradient=np.ones(256, bool),
    )
    tokens = [int(rank.samples.lengths.sum()) for rank in ranks]
    assert max(tokens) < 1.01 * min(tokens)


def test_ranks_get_about_equal_work_where_it_is_asked_for():
    rng = np.random.default_rng(0)
    batch = make_batch(rng.integers(10, 4000, size=256).tolist())
    costs = batch.lengths * 100 + batch.lengths**2

    def spread(costs_given):
        ranks = build_rank_batches(
            batch, data_parallel_size=4, num_steps=1, bounds=Bounds(max_tokens=8192),
            has_gradient=np.ones(256, bool), costs=costs_given,
        )  # fmt: skip
        work = [int((rank.samples.lengths * 100 + rank.samples.lengths**2).sum()) for rank in ranks]
        return max(work) / np.mean(work)

    assert spread(costs) < 1.005 < spread(None)


def test_totals_count_no_failed_rollout():
    batch = make_batch([5, 3, 4, 0], num_steps=2, failed={1})
    totals = step_totals(batch, 2)
    assert [(total.num_rollouts, total.num_tokens) for total in totals] == [(1, 5), (2, 4)]


def test_wrong_bounds_steps_and_shapes_are_errors():
    with pytest.raises(ValueError, match="one of micro_batch_size"):
        Bounds(micro_batch_size=1, max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens is 0; it is at least 1"):
        Bounds(max_tokens=0)
    batch = make_batch([5, 3])
    common = {"data_parallel_size": 1, "bounds": Bounds(micro_batch_size=1)}
    with pytest.raises(ValueError, match=r"has the steps \[0\], and num_steps is 0"):
        build_rank_batches(batch, num_steps=0, has_gradient=np.ones(2, bool), **common)
    with pytest.raises(ValueError, match=r"costs has the shape \[3\] for 2 samples"):
        build_rank_batches(batch, num_steps=1, has_gradient=np.ones(2, bool), costs=np.ones(3), **common)
