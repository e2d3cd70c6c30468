"""Rows of a `RolloutBatch` as the tensors of one packed micro-batch.

Sequences lie one after another, the longest first: neighbours of equal length share a kernel call. A response token is
predicted at the position of the token before it, so `positions` are those, and `targets` the response tokens.

Under context parallelism a rank computes the log-probs of the response tokens that are predicted from its part of the
sequences; they are then gathered, and everything that follows sees all response tokens, as if there were one rank.

`S` sequences, `T` packed tokens of this rank (padding included), `R` response tokens, `R'` of them predicted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from colloid.data.batch import RolloutBatch
from colloid.training.sequence_split import SequenceSplit


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward needs."""

    tokens: torch.Tensor
    """int64 [1, T]; 0 where it is padding."""
    position_ids: torch.Tensor
    """int64 [1, T], from 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """int32 [S + 1], cumulative lengths of the whole sequences with their padding."""
    max_length: int
    """Of a sequence, with its padding."""
    token_index: torch.Tensor
    """int64 [T] on the host, into the batch's tokens: the same whatever micro-batch a sample is in. -1 for padding."""
    positions: torch.Tensor
    """int64 [R'] into the T packed tokens: where each response token is predicted."""
    targets: torch.Tensor
    """int64 [R']."""
    response_rows: torch.Tensor | None
    """int64 [R']: which of the R response tokens are predicted on this rank; None: all."""
    response_index: torch.Tensor
    """int64 [R] into the batch's arrays over response tokens; the same whatever micro-batch a sample is in."""
    sample_index: torch.Tensor
    """int64 [R]: which sequence of the micro-batch a response token belongs to."""
    loss_mask: torch.Tensor
    """bool [R]."""
    rollout_log_probs: torch.Tensor | None
    """float32 [R]; None where no sample has any. NaN for a sample without."""
    teacher_log_probs: torch.Tensor | None
    """float32 [R]; None where the batch has none."""
    token_weights: torch.Tensor
    """float32 [R]: of each token in the step's loss; 0 where masked."""
    rewards: torch.Tensor
    """float64 [S], shaped."""
    sample_tokens: torch.Tensor
    """int64 [sum of `lengths`]: the whole samples, whatever part of them this rank computes."""
    lengths: np.ndarray
    """int64 [S], of prompt and response, without padding."""
    response_lengths: np.ndarray
    """int64 [S]."""

    @property
    def num_samples(self) -> int:
        return len(self.rewards)

    def blank(self) -> MicroBatch:
        """The same sequences with all response tokens masked: it adds nothing to loss, gradient or metrics."""
        mask, weights = torch.zeros_like(self.loss_mask), torch.zeros_like(self.token_weights)
        return replace(self, loss_mask=mask, token_weights=weights)


def make_micro_batch(
    batch: RolloutBatch, rows: np.ndarray, device: str = "cpu", split: SequenceSplit | None = None
) -> MicroBatch:
    """Packs the samples at `rows`.

    Args:
        split: this rank's part of the sequences; None: they are whole.

    Raises:
        ValueError: a sample has no prompt, so that nothing predicts its first response token.
    """
    rows = np.asarray(rows, dtype=np.int64)
    rows = rows[np.argsort(-batch.lengths[rows], kind="stable")]
    # The experts, by far the largest column, are looked up by `token_index`.
    samples = replace(batch, routed_experts=None).select(rows)
    lengths, response_lengths = samples.lengths, samples.response_lengths
    if (lengths == response_lengths).any():
        raise ValueError(f"samples {samples.sample_ids[lengths == response_lengths].tolist()} have no prompt")
    split = split or SequenceSplit()
    padded = split.padded_lengths(lengths)
    cu_seqlens = np.concatenate([[0], np.cumsum(padded)])
    tokens = np.zeros(cu_seqlens[-1], dtype=np.int64)
    at = np.arange(samples.offsets[-1]) + np.repeat(cu_seqlens[:-1] - samples.offsets[:-1], lengths)
    tokens[at] = samples.tokens
    token_index = np.full(len(tokens), -1, dtype=np.int64)
    token_index[at] = np.arange(len(at)) + np.repeat(batch.offsets[rows] - samples.offsets[:-1], lengths)
    owned = split.owned(padded)
    place = np.cumsum(owned) - 1
    sample_index = np.repeat(np.arange(len(rows)), response_lengths)
    # The i-th response token of a sample stands at (its end - response length + i), and is predicted one before.
    first = cu_seqlens[:-1] + lengths - response_lengths
    targets_at = np.arange(len(sample_index)) + np.repeat(first - samples.response_offsets[:-1], response_lengths)
    response_index = np.arange(len(sample_index)) + np.repeat(
        batch.response_offsets[rows] - samples.response_offsets[:-1], response_lengths
    )
    here = np.flatnonzero(owned[targets_at - 1])
    mask = samples.loss_mask.astype(bool)
    weights = np.where(mask, samples.loss_weights[sample_index], 0.0).astype(np.float32)
    has_log_probs = not np.isnan(samples.rollout_log_probs).all()

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        tokens=tensor(tokens[owned])[None],
        position_ids=tensor((np.arange(len(tokens)) - np.repeat(cu_seqlens[:-1], padded))[owned])[None],
        cu_seqlens=tensor(cu_seqlens.astype(np.int32)),
        max_length=int(padded.max()),
        token_index=torch.from_numpy(token_index[owned]),
        positions=tensor(place[targets_at[here] - 1]),
        targets=tensor(tokens[targets_at[here]]),
        response_rows=tensor(here) if split.size > 1 else None,
        response_index=tensor(response_index),
        sample_index=tensor(sample_index),
        loss_mask=tensor(mask),
        rollout_log_probs=tensor(samples.rollout_log_probs) if has_log_probs else None,
        teacher_log_probs=None if samples.teacher_log_probs is None else tensor(samples.teacher_log_probs),
        token_weights=tensor(weights),
        rewards=tensor(samples.rewards),
        sample_tokens=tensor(samples.tokens.astype(np.int64)),
        lengths=lengths,
        response_lengths=response_lengths,
    )


def filled_up(micro_batches: Sequence[MicroBatch], multiple: int) -> list[MicroBatch]:
    """With blank ones behind, so that their number is a multiple; none stay none."""
    if not micro_batches:
        return []
    shortest = min(micro_batches, key=lambda micro_batch: micro_batch.tokens.shape[1])
    return [*micro_batches, *[shortest.blank()] * (-len(micro_batches) % multiple)]


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
