"""How context and sequence parallelism cut a pack: which of its tokens a rank has, and what padding that takes.

Context parallelism deals out each sequence zigzag: cut in 2n chunks for n ranks, rank r has chunks r and 2n - 1 - r,
so that under causal attention all ranks do the same work. Sequence parallelism cuts a rank's tokens once more, in equal
parts. Padding stands behind a sequence's tokens, where causal attention never looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SequenceSplit:
    """A rank's place in the division of sequences."""

    rank: int = 0
    size: int = 1
    """Of context parallelism."""
    multiple: int = 1
    """What the number of a rank's tokens has to be a multiple of: of the ranks of sequence parallelism, and of what
    `--data-pad-size-multiplier` says."""

    def padded_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """int64 [S]: each sequence's length with its padding; the last one's also fills the pack."""
        chunk = 2 * self.size if self.size > 1 else 1
        padded = -(-lengths // chunk) * chunk
        unit = math.lcm(chunk, self.size * self.multiple)
        padded[-1] += -int(padded.sum()) % unit
        return padded

    def owned(self, padded_lengths: np.ndarray) -> np.ndarray:
        """bool [padded tokens of the pack]: which of them this rank has, in their order."""
        if self.size == 1:
            return np.ones(int(padded_lengths.sum()), dtype=bool)
        chunks = np.tile(np.arange(2 * self.size), len(padded_lengths))
        owners = np.minimum(chunks, 2 * self.size - 1 - chunks)
        return np.repeat(owners == self.rank, np.repeat(padded_lengths // (2 * self.size), 2 * self.size))
