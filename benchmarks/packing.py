"""How long packing takes, and how even its packs are.

    python benchmarks/packing.py

Deals 8,192 lengths to 64 bins, as a step's samples go to 64 data-parallel ranks, for several kinds of lengths; then
makes micro-batches of at most 32,768 tokens of the same lengths. `max/mean` is that of the bins' tokens: by so much
longer than the mean rank the slowest one computes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from colloid.data.packing import deal, pack_by_tokens

COUNT, BINS, BUDGET, REPEATS = 8192, 64, 32768, 15


def length_kinds() -> dict[str, np.ndarray]:
    """Lengths as they occur: any, of one peak, many at the limit, two peaks, short."""
    random = np.random.default_rng(0)
    return {
        "uniform": random.integers(64, 16384, COUNT),
        "lognormal": np.clip(random.lognormal(7, 1, COUNT), 10, 32768).astype(np.int64),
        "cut at a limit": np.minimum(random.integers(5000, 30000, COUNT), 16384),
        "bimodal": np.where(random.random(COUNT) < 0.3, 16384, random.integers(200, 2000, COUNT)),
        "short": random.integers(1, 100, COUNT),
    }


def best_of(function: Callable[[], list[np.ndarray]]) -> tuple[float, list[np.ndarray]]:
    """Least milliseconds of some repeats, and the result."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        packs = function()
        seconds.append(time.perf_counter() - start)
    return min(seconds) * 1e3, packs


def main() -> None:
    """Prints one line a kind of lengths."""
    print(f"{COUNT} lengths into {BINS} bins | into micro-batches of at most {BUDGET} tokens")
    print(f"{'lengths':<16}{'ms':>8}{'max/mean':>12} | {'ms':>8}{'packs':>8}{'filled':>8}")
    for name, lengths in length_kinds().items():
        milliseconds, bins = best_of(lambda lengths=lengths: deal(lengths, BINS))
        tokens = np.asarray([lengths[pack].sum() for pack in bins])
        pack_milliseconds, packs = best_of(lambda lengths=lengths: pack_by_tokens(lengths, BUDGET, multiple_of=8))
        filled = lengths.sum() / (len(packs) * BUDGET)
        print(
            f"{name:<16}{milliseconds:>8.2f}{tokens.max() / tokens.mean():>12.6f} | "
            f"{pack_milliseconds:>8.1f}{len(packs):>8}{filled:>8.1%}"
        )


if __name__ == "__main__":
    main()
