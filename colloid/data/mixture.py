"""Several sources of prompts, drawn by weight: a deterministic sequence that a resume goes on with.

Draw n comes from source i with probability weights[i] / sum(weights), decided by (seed, n) alone. Each source goes
through its own epochs: a small one with a large weight comes around often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from colloid.data.rows import PromptDataset, PromptRow
from colloid.data.stream import PromptStream

BLOCK = 4096
"""Draws that are decided together."""


class Shuffled:
    """A data set in memory as an endless sequence; epoch e is shuffled by seed + e."""

    def __init__(self, dataset: PromptDataset, *, seed: int, shuffle: bool):
        self.path, self.fingerprint = dataset.path, dataset.fingerprint
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self.epoch, self._taken = 0, 0
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def head(self) -> list[PromptRow]:
        """All rows."""
        return self._dataset.rows

    def next_row(self) -> PromptRow:
        """The next prompt."""
        if self._taken >= len(self):
            self.epoch, self._taken = self.epoch + 1, 0
        row = self._taken
        self._taken += 1
        if not self._shuffle:
            return self._dataset.rows[row]
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, np.random.default_rng(self._seed + self.epoch).permutation(len(self))
        return self._dataset.rows[self._order[1][row]]

    def state(self) -> dict[str, Any]:
        """Plain data: where to go on."""
        return {"epoch": self.epoch, "taken": self._taken}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.epoch, self._taken = state["epoch"], state["taken"]

    def metrics(self) -> dict[str, float]:
        """See `PromptDataset.metrics`."""
        return self._dataset.metrics()

    def close(self) -> None:
        """Nothing is open."""


class Mixture:
    """An endless sequence of prompts from several sources.

    Args:
        sources: one or more.
        weights: above 0, as many; only their ratios count.
    """

    def __init__(self, sources: Sequence[Shuffled | PromptStream], weights: Sequence[float], *, seed: int):
        self._sources = list(sources)
        self._shares = np.asarray(weights, dtype=np.float64) / sum(weights)
        self._seed, self._drawn = seed, 0
        self._block: tuple[int, np.ndarray] | None = None
        self.path = ", ".join(source.path for source in sources)
        prints = "".join(source.fingerprint for source in sources)
        self.fingerprint = xxhash.xxh3_128(f"{prints} {self._shares.tolist()} {seed}".encode()).hexdigest()

    def __len__(self) -> int:
        """What an epoch is taken to be: as many prompts as all sources have together."""
        return sum(len(source) for source in self._sources)

    @property
    def epoch(self) -> int:
        """Passes over the source that has had the fewest."""
        return min(source.epoch for source in self._sources)

    def head(self) -> list[PromptRow]:
        """The rows of all sources that can be looked at before the run."""
        return [row for source in self._sources for row in source.head()]

    def next_row(self) -> PromptRow:
        """The next prompt."""
        number, place = divmod(self._drawn, BLOCK)
        if self._block is None or self._block[0] != number:
            generator = np.random.default_rng([self._seed, number])
            self._block = number, generator.choice(len(self._sources), BLOCK, p=self._shares)
        row = self._sources[self._block[1][place]].next_row()
        self._drawn += 1
        return row

    def sample(self, count: int) -> list[PromptRow]:
        """The next `count` prompts: what a data source of one's own calls, however the data is read."""
        return [self.next_row() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Plain data: where to go on."""
        return {"drawn": self._drawn, "sources": [source.state() for source in self._sources]}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._drawn = state["drawn"]
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.load_state(saved)

    def metrics(self) -> dict[str, float]:
        """The sums of what the sources left out, and the epoch."""
        found: dict[str, float] = {}
        for source in self._sources:
            for name, value in source.metrics().items():
                found[name] = found.get(name, 0.0) + value
        return {**found, "data/epoch": float(self.epoch)}

    def close(self) -> None:
        """Ends what the sources have open."""
        for source in self._sources:
            source.close()
