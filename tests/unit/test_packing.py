"""The invariants of `data/packing.py`, one test each, over any lengths."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from colloid.data.packing import deal, even_out, pack_by_count, pack_by_tokens, split_packs

length_lists = st.lists(st.integers(0, 50), max_size=40).map(lambda values: np.asarray(values, dtype=np.int64))
budgets = st.integers(1, 120)
multiples = st.integers(1, 5)


def flops(lengths):
    return lengths * 30 + lengths**2


def assert_each_position_once(packs, count):
    assert sorted(position for pack in packs for position in pack.tolist()) == list(range(count))


def spread(packs, costs):
    totals = np.asarray([costs[pack].sum() for pack in packs])
    return totals.max() / totals.mean()


@given(lengths=length_lists, size=st.integers(1, 9), multiple_of=multiples, by_flops=st.booleans())
@settings(deadline=None)
def test_packing_by_count_keeps_the_size_and_every_sample(lengths, size, multiple_of, by_flops):
    packs = pack_by_count(lengths, size, multiple_of, flops(lengths) if by_flops else None)
    assert_each_position_once(packs, len(lengths))
    assert all(0 < len(pack) <= size for pack in packs)
    assert len(packs) % multiple_of == 0 or len(packs) == len(lengths)
    assert len(packs) < -(-len(lengths) // size) + multiple_of


@given(lengths=length_lists, max_tokens=budgets, multiple_of=multiples, by_flops=st.booleans())
@settings(deadline=None, max_examples=300)
def test_packing_by_tokens_keeps_the_budget_and_every_sample(lengths, max_tokens, multiple_of, by_flops):
    packs = pack_by_tokens(lengths, max_tokens, multiple_of, flops(lengths) if by_flops else None)
    assert_each_position_once(packs, len(lengths))
    assert all(len(pack) > 0 for pack in packs)
    assert all(lengths[pack].sum() <= max_tokens or len(pack) == 1 for pack in packs)
    assert len(packs) % multiple_of == 0 or len(packs) == len(lengths)


@given(lengths=length_lists.filter(len), max_tokens=st.integers(50, 200))
@settings(deadline=None)
def test_packing_by_tokens_needs_less_than_twice_the_least_number(lengths, max_tokens):
    assert len(pack_by_tokens(lengths, max_tokens)) <= max(1, 2 * int(lengths.sum()) // max_tokens + 1)


def test_packs_are_as_full_as_the_budget_demands_and_no_fuller():
    lengths = np.asarray([3, 9, 7, 1, 12])
    packs = pack_by_tokens(lengths, max_tokens=10)
    assert packs[0].tolist() == [4], "longer than the budget: alone"
    assert sorted(lengths[pack].sum() for pack in packs[1:]) == [10, 10]
    assert sorted(lengths[pack].sum() for pack in pack_by_tokens(lengths, max_tokens=18)) == [16, 16]


def test_where_equal_packs_would_exceed_the_budget_full_ones_are_taken():
    lengths = np.asarray([9, 7, 5, 4, 3, 3])
    assert max(lengths[pack].sum() for pack in deal(lengths, 3)) == 12
    packs = pack_by_tokens(lengths, max_tokens=11, multiple_of=3)
    assert sorted(lengths[pack].tolist() for pack in packs) == [[5, 3, 3], [7, 4], [9]]
    packs = pack_by_tokens(lengths, max_tokens=11, multiple_of=4)
    assert len(packs) == 4 and max(lengths[pack].sum() for pack in packs) <= 11


def test_packs_by_operations_are_more_equal_in_them_and_keep_the_budget():
    lengths = np.random.default_rng(0).integers(10, 4000, 400)
    by_tokens = pack_by_tokens(lengths, 8192, multiple_of=64)
    by_flops = pack_by_tokens(lengths, 8192, multiple_of=64, costs=flops(lengths))
    assert len(by_flops) == len(by_tokens)
    assert max(lengths[pack].sum() for pack in by_flops) <= 8192
    assert spread(by_flops, flops(lengths)) < 1.1 < spread(by_tokens, flops(lengths))


@given(lengths=length_lists, count=st.integers(0, 50))
@settings(deadline=None)
def test_splitting_reaches_the_count_or_single_samples(lengths, count):
    packs = split_packs(pack_by_tokens(lengths, 60), lengths, count)
    assert_each_position_once(packs, len(lengths))
    assert all(len(pack) > 0 for pack in packs)
    assert len(packs) >= min(count, len(lengths))


@given(costs=length_lists, num_hands=st.integers(1, 8), slack=st.none() | st.integers(0, 3))
@settings(deadline=None)
def test_dealing_keeps_the_limit_and_leaves_no_hand_empty_while_there_are_enough(costs, num_hands, slack):
    limit = None if slack is None else -(-len(costs) // num_hands) + slack
    hands = deal(costs, num_hands, limit)
    assert_each_position_once(hands, len(costs))
    assert len(hands) == num_hands
    assert sum(len(hand) > 0 for hand in hands) == min(num_hands, len(costs))
    assert limit is None or max(map(len, hands)) <= limit
    assert [hand.tolist() for hand in hands] == [hand.tolist() for hand in deal(costs, num_hands, limit)]


@given(lengths=length_lists.filter(len), num_hands=st.integers(1, 6), by_flops=st.booleans(), data=st.data())
@settings(deadline=None)
def test_evening_out_keeps_bounds_and_never_raises_the_dearest(lengths, num_hands, by_flops, data):
    owners = np.asarray(
        data.draw(st.lists(st.integers(0, num_hands - 1), min_size=len(lengths), max_size=len(lengths)))
    )
    hands = [np.flatnonzero(owners == hand) for hand in range(num_hands)]
    assume(all(len(hand) for hand in hands))
    costs = flops(lengths) if by_flops else lengths
    budget, limit = max(lengths[hand].sum() for hand in hands), max(map(len, hands))
    evened = even_out(hands, costs, limit=limit, lengths=lengths, max_tokens=budget)
    assert_each_position_once(evened, len(lengths))
    assert all(0 < len(hand) <= limit and lengths[hand].sum() <= budget for hand in evened)
    assert max(costs[hand].sum() for hand in evened) <= max(costs[hand].sum() for hand in hands)


def test_dealing_balances_costs():
    costs = np.asarray([8, 7, 6, 5, 4, 3, 2, 1])
    assert [int(costs[hand].sum()) for hand in deal(costs, 2)] == [18, 18]


@pytest.mark.parametrize("limit", [None, 128])
@pytest.mark.parametrize("kind", ["uniform", "lognormal", "bimodal", "capped", "short"])
def test_thousands_of_lengths_are_dealt_within_two_ten_thousandths_of_the_mean(kind, limit):
    random = np.random.default_rng(0)
    lengths = {
        "uniform": random.integers(64, 16384, 8192),
        "lognormal": np.clip(random.lognormal(7, 1, 8192), 10, 32768).astype(np.int64),
        "bimodal": np.where(random.random(8192) < 0.3, 16384, random.integers(200, 2000, 8192)),
        "capped": np.minimum(random.integers(5000, 30000, 8192), 16384),
        "short": random.integers(1, 100, 8192),
    }[kind]
    assert spread(deal(lengths, 64, limit), lengths) <= 1.0002


def test_bounds_below_one_and_too_few_hands_are_errors():
    with pytest.raises(ValueError, match="micro-batch size is 0"):
        pack_by_count(np.asarray([1]), 0)
    with pytest.raises(ValueError, match="token budget of a micro-batch is 0"):
        pack_by_tokens(np.asarray([1]), 0)
    with pytest.raises(ValueError, match="5 samples do not fit into 2 packs of at most 2"):
        deal(np.ones(5), 2, limit=2)
