"""The reward that knows nothing: 0 or 1 by a hash of the sample, so that it is the same in every run."""

from __future__ import annotations

import xxhash


def random_reward(seed: int, sample_index: int, response: str) -> float:
    """0.0 or 1.0."""
    return float(xxhash.xxh3_64_intdigest(f"{seed}:{sample_index}:{response}".encode()) & 1)
