"""What goes from the rollout manager to the trainer: columns over samples and tokens, packed, with offsets.

Philosophy: everything that depends on the whole global batch (loss denominators, shaped rewards, which samples can
have no gradient) is computed once, before the batch is split, and travels with each sample. So the gradient cannot
depend on ranks, micro-batches, packing or order.

Invariants:
1. A sample keeps its columns through `select`: pairing is by position in one table, and `sample_ids` names the row.
2. `loss_weights[i]` is the weight of one unmasked token of sample i in its step's loss: the loss of a step is
   sum over its samples i, over tokens t with mask 1, of loss_weights[i] * loss[t].
3. Every step has the same number of micro-batches on every rank; none is empty.

B samples, T tokens (prompt and response), R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np


@dataclass(frozen=True)
class RolloutBatch:
    """Samples as columns. All arrays are plain numpy, so that Ray's object store hands them over without a copy."""

    tokens: np.ndarray
    """int32 [T], prompt then response, sample after sample."""
    offsets: np.ndarray
    """int64 [B + 1] into `tokens`."""
    response_offsets: np.ndarray
    """int64 [B + 1] into the arrays over response tokens."""
    loss_mask: np.ndarray
    """uint8 [R]."""
    rollout_log_probs: np.ndarray
    """float32 [R]; NaN for every token of a sample that has none."""
    weight_versions: np.ndarray
    """int32 [R]; -1 where unknown."""
    sample_ids: np.ndarray
    """int64 [B], `Sample.index`."""
    group_ids: np.ndarray
    """int64 [B], `Sample.group_index`."""
    rollout_ids: np.ndarray
    """int64 [B]; siblings share it."""
    raw_rewards: np.ndarray
    """float64 [B]."""
    rewards: np.ndarray
    """float64 [B], shaped by the estimator's group baseline."""
    steps: np.ndarray
    """int32 [B]: the optimizer step, from 0, that trains the sample."""
    loss_weights: np.ndarray
    """float64 [B], see invariant 2."""
    rollout_tokens: np.ndarray
    """int64 [B]: unmasked tokens of the sample's rollout, all siblings together."""
    teacher_log_probs: np.ndarray | None = None
    """float32 [R], of a teacher behind an engine; NaN for every token of a sample that has none."""
    routed_experts: np.ndarray | None = None
    """int16 [T, layers, experts a token], as the engine chose them; -1 where that is not known."""

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B]: prompt and response."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 [B]."""
        return np.diff(self.response_offsets)

    def select(self, rows: np.ndarray) -> RolloutBatch:
        """The samples at these rows, in this order. A copy."""
        rows = np.asarray(rows, dtype=np.int64)
        token_rows, offsets = _gather(self.offsets, rows)
        response_rows, response_offsets = _gather(self.response_offsets, rows)
        columns = {}
        for column in fields(self):
            values = getattr(self, column.name)
            if values is None:
                columns[column.name] = None
            elif column.name in ("tokens", "routed_experts"):
                columns[column.name] = values[token_rows]
            elif column.name in ("loss_mask", "rollout_log_probs", "weight_versions", "teacher_log_probs"):
                columns[column.name] = values[response_rows]
            elif column.name not in ("offsets", "response_offsets"):
                columns[column.name] = values[rows]
        return RolloutBatch(offsets=offsets, response_offsets=response_offsets, **columns)


@dataclass(frozen=True)
class StepTotals:
    """Sums over one step's global batch: the denominators of loss and metrics."""

    num_rollouts: int
    num_tokens: int
    """Unmasked response tokens."""


@dataclass(frozen=True)
class RankBatch:
    """One data-parallel rank's part of a rollout, scheduled."""

    samples: RolloutBatch
    micro_batches: list[list[np.ndarray]] = field(default_factory=list)
    """[step][micro-batch] -> rows of `samples`. Samples without a gradient are in no micro-batch."""
    totals: list[StepTotals] = field(default_factory=list)
    """[step]."""
    log_prob_micro_batches: list[list[np.ndarray]] = field(default_factory=list)
    """As `micro_batches`, the same rows in larger packs, for passes without a backward. Empty: `micro_batches`."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Prompt and response tokens of the samples in micro-batches."""
        return sum(int(self.samples.lengths[rows].sum()) for step in self.micro_batches for rows in step)


def _gather(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of all elements of the segments `rows`, and the new offsets."""
    lengths = offsets[rows + 1] - offsets[rows]
    new = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=new[1:])
    return np.arange(new[-1]) + np.repeat(offsets[rows] - new[:-1], lengths), new
