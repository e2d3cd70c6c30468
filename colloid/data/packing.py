"""Which samples share a micro-batch. Pure numpy, on lengths alone; a pack is an array of positions in `lengths`.

Pack first, distribute second: packs are made from a step's samples without regard to ranks, then dealt to ranks.

Invariants, for every function that makes packs:
1. every position is in exactly one pack, and no pack is empty;
2. the result depends on nothing but the arguments (ties go to the lower position).

By count: no pack has more than `size` samples. By tokens: no pack exceeds the budget, except that a sample which is
longer than the budget stands alone.
"""

from __future__ import annotations

import numpy as np


def pack_by_count(lengths: np.ndarray, size: int, multiple_of: int = 1) -> list[np.ndarray]:
    """Packs of at most `size` samples, about equal in tokens and in samples.

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
    return deal(lengths, num_packs, limit=-(-count // num_packs))


def pack_by_tokens(lengths: np.ndarray, max_tokens: int, multiple_of: int = 1) -> list[np.ndarray]:
    """Packs of at most `max_tokens` tokens.

    The number of packs is what first fit (longest first) needs, rounded up to a multiple of `multiple_of`, or the
    number of samples where that is less. With that number the packs are made about equal, where the budget admits it.

    Raises:
        ValueError: `max_tokens` is less than 1.
    """
    if max_tokens < 1:
        raise ValueError(f"the token budget of a micro-batch is {max_tokens}; it is at least 1")
    lengths = np.asarray(lengths, dtype=np.int64)
    packs = _first_fit(lengths, max_tokens)
    num_packs = min(_round_up(len(packs), multiple_of), len(lengths))
    if num_packs == 0:
        return []
    balanced = deal(lengths, num_packs)
    if all(len(pack) == 1 or lengths[pack].sum() <= max_tokens for pack in balanced):
        return balanced
    return split_packs(packs, lengths, num_packs)


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

    The dearest first, each to the cheapest hand that has room; the last ones go to hands that are still empty.

    Raises:
        ValueError: `limit` hands cannot hold all.
    """
    costs = np.asarray(costs, dtype=np.int64)
    limit = len(costs) if limit is None else limit
    if num_hands * limit < len(costs):
        raise ValueError(f"{len(costs)} samples do not fit into {num_hands} packs of at most {limit}")
    sums = np.zeros(num_hands, dtype=np.int64)
    sizes = np.zeros(num_hands, dtype=np.int64)
    owner = np.empty(len(costs), dtype=np.int64)
    full = np.iinfo(np.int64).max
    for dealt, position in enumerate(_longest_first(costs)):
        open_hands = sizes < limit
        if len(costs) - dealt <= np.count_nonzero(sizes == 0):
            open_hands = sizes == 0
        hand = int(np.where(open_hands, sums, full).argmin())
        owner[position] = hand
        sums[hand] += costs[position]
        sizes[hand] += 1
    return [np.flatnonzero(owner == hand) for hand in range(num_hands)]


def _first_fit(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    free = np.empty(len(lengths), dtype=np.int64)
    packs: list[list[int]] = []
    for position in _longest_first(lengths):
        length = lengths[position]
        fitting = np.flatnonzero(free[: len(packs)] >= length)
        if len(fitting):
            packs[fitting[0]].append(int(position))
            free[fitting[0]] -= length
        else:
            # What exceeds the budget leaves a negative rest, so that not even an empty sample joins it.
            free[len(packs)] = max_tokens - length
            packs.append([int(position)])
    return [np.sort(np.asarray(pack, dtype=np.int64)) for pack in packs]


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    return np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
