"""Which samples share a micro-batch. Pure numpy, on lengths alone; a pack is an array of positions in `lengths`.

Pack first, distribute second: packs are made from a step's samples without regard to ranks, then dealt to ranks.

Invariants, for every function that makes packs:
1. every position is in exactly one pack, and no pack is empty;
2. the result depends on nothing but the arguments (ties go to the lower position);
3. by count: no pack has more than `size` samples;
4. by tokens: no pack exceeds the budget, except that a sample which is longer than the budget stands alone;
5. the number of packs is a multiple of `multiple_of`, or that of the samples where these are too few.

Packs are about equal in `costs` (default: tokens) as far as 3 and 4 admit. The dearest samples are dealt first, each to
the cheapest hand (Graham 1969, longest processing time first); then the dearest hands pass on what evens them out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

EVEN = 1.00015
"""Of hands whose dearest is at most this multiple of their mean, none passes anything on."""
MAX_EXCHANGES = 256
CHEAP_HANDS = 8
"""The dearest hand tries so many of the cheapest ones before it gives up."""


def pack_by_count(
    lengths: np.ndarray, size: int, multiple_of: int = 1, costs: np.ndarray | None = None
) -> list[np.ndarray]:
    """Packs of at most `size` samples, about equal in costs and in samples.

    The number of packs is the smallest multiple of `multiple_of` that holds all, or the number of samples where that
    is less.

    Raises:
        ValueError: `size` is less than 1.
    """
    if size < 1:
        raise ValueError(f"the micro-batch size is {size}; it is at least 1")
    count = len(lengths)
    num_packs = min(_round_up(-(-count // size), multiple_of), count)
    if num_packs == 0:
        return []
    return deal(lengths if costs is None else costs, num_packs, limit=-(-count // num_packs))


def pack_by_tokens(
    lengths: np.ndarray, max_tokens: int, multiple_of: int = 1, costs: np.ndarray | None = None
) -> list[np.ndarray]:
    """Packs of at most `max_tokens` tokens.

    The number of packs is what best fit (longest first) needs, rounded up to a multiple of `multiple_of`, or the
    number of samples where that is less. With that number the packs are made about equal, where the budget admits it.

    Args:
        costs: int [N], not falling where lengths rise; what is evened out. None: the lengths.

    Raises:
        ValueError: `max_tokens` is less than 1.
    """
    if max_tokens < 1:
        raise ValueError(f"the token budget of a micro-batch is {max_tokens}; it is at least 1")
    lengths = np.asarray(lengths, dtype=np.int64)
    costs = lengths if costs is None else np.asarray(costs, dtype=np.int64)
    alone = [np.asarray([position]) for position in np.flatnonzero(lengths > max_tokens)]
    rows = np.flatnonzero(lengths <= max_tokens)
    packs = _best_fit(lengths[rows], max_tokens)
    num_packs = min(_round_up(len(packs) + len(alone), multiple_of), len(lengths)) - len(alone)
    if num_packs == 0:
        return alone
    own_lengths, own_costs = lengths[rows], costs[rows]

    def fits(packs: list[np.ndarray]) -> bool:
        return bool((_totals(packs, own_lengths) <= max_tokens).all())

    dealt = deal(own_costs, num_packs)
    if not fits(dealt):
        by_tokens = dealt if costs is lengths else deal(own_lengths, num_packs)
        dealt = by_tokens if fits(by_tokens) else split_packs(packs, own_lengths, num_packs)
        dealt = even_out(dealt, own_costs, lengths=own_lengths, max_tokens=max_tokens)
    return alone + [rows[pack] for pack in dealt]


def split_packs(packs: list[np.ndarray], lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """Splits the largest packs until there are `count`, or until every pack is one sample."""
    packs = list(packs)
    tokens = [int(lengths[pack].sum()) if len(pack) > 1 else -1 for pack in packs]
    while len(packs) < count and max(tokens, default=-1) >= 0:
        largest = int(np.argmax(tokens))
        pack = packs[largest]
        halves = [pack[half] for half in deal(lengths[pack], 2)]
        packs[largest : largest + 1] = halves
        tokens[largest : largest + 1] = [int(lengths[half].sum()) if len(half) > 1 else -1 for half in halves]
    return packs


def deal(costs: np.ndarray, num_hands: int, limit: int | None = None) -> list[np.ndarray]:
    """Deals positions to `num_hands` hands of about equal cost, at most `limit` each, none empty if there are enough.

    Raises:
        ValueError: `limit` hands cannot hold all.
    """
    costs = np.asarray(costs, dtype=np.int64)
    count = len(costs)
    limit = count if limit is None else limit
    if num_hands * limit < count:
        raise ValueError(f"{count} samples do not fit into {num_hands} packs of at most {limit}")
    order = _longest_first(costs)
    # A hand's place in the heap is (cost, samples, number) in one integer; so an empty hand comes first.
    steps = ((costs[order] * (count + 1) + 1) * num_hands).tolist()
    heap = list(range(num_hands))
    owner: list[int] = []
    if limit >= count:
        for step in steps:
            first = heap[0]
            owner.append(first % num_hands)
            heapq.heapreplace(heap, first + step)
    else:
        sizes = [0] * num_hands
        for step in steps:
            first = heap[0]
            hand = first % num_hands
            owner.append(hand)
            sizes[hand] += 1
            if sizes[hand] < limit:
                heapq.heapreplace(heap, first + step)
            else:
                heapq.heappop(heap)
    return even_out(_hands(order, owner, num_hands), costs, limit=limit)


def even_out(
    hands: list[np.ndarray],
    costs: np.ndarray,
    *,
    limit: int | None = None,
    lengths: np.ndarray | None = None,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """Lowers the cost of the dearest hand: again and again it gives a sample to a cheap one, or exchanges one with it.

    Args:
        limit: samples that a hand has at most; None: any number.
        lengths: int [N], which rise with the costs; with `max_tokens`, a hand's budget that stays kept.

    Returns:
        As many hands; none is emptied.
    """
    hands = list(hands)
    totals = _totals(hands, costs)
    if len(hands) < 2:
        return hands
    enough = max(totals.mean() * EVEN, float(-(-totals.sum() // len(hands))))
    for _ in range(MAX_EXCHANGES):
        dear = int(totals.argmax())
        if totals[dear] <= enough:
            break
        for cheap in _cheapest(totals, CHEAP_HANDS):
            room = None if max_tokens is None else max_tokens - int(lengths[hands[cheap]].sum())
            may_give = len(hands[dear]) > 1 and (limit is None or len(hands[cheap]) < limit)
            gap = int(totals[dear] - totals[cheap])
            pair = _best_exchange(hands[dear], hands[cheap], costs, gap, may_give, lengths, room)
            if pair is not None:
                break
        else:
            break
        given, taken = pair
        hands[dear] = np.sort(np.concatenate([hands[dear][hands[dear] != given], taken]))
        kept = hands[cheap][hands[cheap] != taken] if len(taken) else hands[cheap]
        hands[cheap] = np.sort(np.append(kept, given))
        moved = costs[given] - costs[taken].sum()
        totals[dear] -= moved
        totals[cheap] += moved
    return hands


def _cheapest(totals: np.ndarray, count: int) -> list[int]:
    few = np.argpartition(totals, count)[:count] if count < len(totals) else np.arange(len(totals))
    return few[np.lexsort((few, totals[few]))].tolist()


def _best_exchange(
    dear: np.ndarray,
    cheap: np.ndarray,
    costs: np.ndarray,
    gap: int,
    may_give: bool,
    lengths: np.ndarray | None,
    room: int | None,
) -> tuple[int, np.ndarray] | None:
    """(position to give, positions to take back: one or none) that halves the gap as nearly as can be, or None."""
    back = cheap[np.argsort(costs[cheap], kind="stable")]
    # "Nothing" is a sample without cost and tokens, in front of the cheapest.
    prices = np.concatenate([[0], costs[back]]) if may_give else costs[back]
    if not len(prices):
        return None
    lowest = np.zeros(len(dear), dtype=np.int64)
    if room is not None:
        tokens = np.concatenate([[0], lengths[back]]) if may_give else lengths[back]
        lowest = np.searchsorted(tokens, lengths[dear] - room)
    wanted = np.searchsorted(prices, costs[dear] - gap / 2)
    candidates = np.stack([np.maximum(wanted - 1, lowest), np.maximum(wanted, lowest)])
    inside = candidates < len(prices)
    moved = costs[dear] - prices[np.minimum(candidates, len(prices) - 1)]
    off = np.where(inside & (moved > 0) & (moved < gap), np.abs(2 * moved - gap), gap)
    best = int(off.argmin())
    if off.flat[best] >= gap:
        return None
    row, column = divmod(best, len(dear))
    place = int(candidates[row, column]) - may_give
    return int(dear[column]), back[place : place + 1] if place >= 0 else back[:0]


def _hands(order: np.ndarray, owner: list[int], num_hands: int) -> list[np.ndarray]:
    owners = np.asarray(owner, dtype=np.int64)
    by_hand = order[np.lexsort((order, owners))]
    return np.split(by_hand, np.cumsum(np.bincount(owners, minlength=num_hands))[:-1])


def _totals(packs: list[np.ndarray], values: np.ndarray) -> np.ndarray:
    """int64 [packs]: the sum of each."""
    if not packs:
        return np.zeros(0, dtype=np.int64)
    sums = np.concatenate([[0], np.cumsum(values[np.concatenate(packs)])])
    return np.diff(sums[np.cumsum([0, *map(len, packs)])])


def _best_fit(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Each sample, the longest first, goes to the fullest pack that has room; all lengths are within the budget."""
    order = _longest_first(lengths)
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens, pack), sorted
    for position, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(free, (length, -1))
        if place < len(free):
            room, pack = free.pop(place)
        else:
            room, pack = max_tokens, len(packs)
            packs.append([])
        packs[pack].append(position)
        insort(free, (room - length, pack))
    return [np.sort(np.asarray(pack, dtype=np.int64)) for pack in packs]


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    return np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
