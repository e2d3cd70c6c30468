"""Rows of a `RolloutBatch` as the tensors of one packed micro-batch.

Sequences lie one after another, the longest first: neighbours of equal length share a kernel call. A response token is
predicted at the position of the token before it, so `positions` are those, and `targets` the response tokens.

`S` sequences, `T` packed tokens, `R` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from colloid.data.batch import RolloutBatch


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward needs."""

    tokens: torch.Tensor
    """int64 [1, T]."""
    position_ids: torch.Tensor
    """int64 [1, T], from 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """int32 [S + 1], cumulative lengths of the sequences."""
    max_length: int
    """Of a sequence."""
    positions: torch.Tensor
    """int64 [R] into the T packed tokens: where each response token is predicted."""
    targets: torch.Tensor
    """int64 [R]."""
    response_index: torch.Tensor
    """int64 [R] into the batch's arrays over response tokens; the same whatever micro-batch a sample is in."""
    sample_index: torch.Tensor
    """int64 [R]: which sequence of the micro-batch a response token belongs to."""
    loss_mask: torch.Tensor
    """bool [R]."""
    rollout_log_probs: torch.Tensor | None
    """float32 [R]; None where no sample has any. NaN for a sample without."""
    token_weights: torch.Tensor
    """float32 [R]: of each token in the step's loss; 0 where masked."""
    rewards: torch.Tensor
    """float64 [S], shaped."""

    @property
    def num_samples(self) -> int:
        return len(self.rewards)


def make_micro_batch(batch: RolloutBatch, rows: np.ndarray, device: str = "cpu") -> MicroBatch:
    """Packs the samples at `rows`.

    Raises:
        ValueError: a sample has no prompt, so that nothing predicts its first response token.
    """
    rows = np.asarray(rows, dtype=np.int64)
    rows = rows[np.argsort(-batch.lengths[rows], kind="stable")]
    samples = batch.select(rows)
    lengths, response_lengths = samples.lengths, samples.response_lengths
    if (lengths == response_lengths).any():
        raise ValueError(f"samples {samples.sample_ids[lengths == response_lengths].tolist()} have no prompt")
    num_tokens = int(samples.offsets[-1])
    starts = np.repeat(samples.offsets[:-1], lengths)
    sample_index = np.repeat(np.arange(len(rows)), response_lengths)
    # The i-th response token of a sample stands at (its end - response length + i), and is predicted one before.
    first = samples.offsets[1:] - response_lengths
    targets_at = np.arange(len(sample_index)) + np.repeat(first - samples.response_offsets[:-1], response_lengths)
    response_index = np.arange(len(sample_index)) + np.repeat(
        batch.response_offsets[rows] - samples.response_offsets[:-1], response_lengths
    )
    mask = samples.loss_mask.astype(bool)
    weights = np.where(mask, samples.loss_weights[sample_index], 0.0).astype(np.float32)
    tokens = samples.tokens.astype(np.int64)
    has_log_probs = not np.isnan(samples.rollout_log_probs).all()

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        tokens=tensor(tokens)[None],
        position_ids=tensor(np.arange(num_tokens) - starts)[None],
        cu_seqlens=tensor(samples.offsets.astype(np.int32)),
        max_length=int(lengths.max()),
        positions=tensor(targets_at - 1),
        targets=tensor(tokens[targets_at]),
        response_index=tensor(response_index),
        sample_index=tensor(sample_index),
        loss_mask=tensor(mask),
        rollout_log_probs=tensor(samples.rollout_log_probs) if has_log_probs else None,
        token_weights=tensor(weights),
        rewards=tensor(samples.rewards),
    )


def regroup(
    values: Sequence[torch.Tensor], computed: Sequence[MicroBatch], wanted: Sequence[MicroBatch]
) -> list[torch.Tensor]:
    """Values over the response tokens [R] of the micro-batches `computed`, in those of `wanted`.

    Both are made of the same samples of one batch. Without values (not the last pipeline stage) there are none.
    """
    if not values:
        return []
    index = torch.cat([micro_batch.response_index for micro_batch in computed])
    flat = values[0].new_empty(int(index.max()) + 1 if len(index) else 0)
    flat[index] = torch.cat(list(values))
    return [flat[micro_batch.response_index] for micro_batch in wanted]
