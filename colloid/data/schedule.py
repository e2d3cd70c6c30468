"""The batch schedule: which rank trains which samples, in which step and micro-batch.

Philosophy: pack first, distribute second. A step's samples are packed into micro-batches without regard to ranks; the
packs are then dealt to the ranks. As every sample already carries its loss weight, no such choice changes the
gradient.

Invariants:
1. Every sample is in exactly one rank's `samples` (plus fillers), and every sample with a gradient is in exactly one
   micro-batch, that of its own step.
2. A step has the same number of micro-batches on every rank; none is empty. A step in which no sample has a gradient
   has none.
3. A micro-batch has at most `micro_batch_size` samples, or at most `max_tokens` tokens (a longer sample alone).
4. Where there are fewer samples than micro-batches to fill, a rank gets fillers: copies of a short sample with mask 0
   and loss weight 0, which take part in no sum.
"""

from __future__ import annotations

import numpy as np

from colloid.data.batch import RankBatch, RolloutBatch, StepTotals
from colloid.data.columns import count_rollouts
from colloid.data.packing import deal, pack_by_count, pack_by_tokens


def build_rank_batches(
    batch: RolloutBatch,
    *,
    data_parallel_size: int,
    num_steps: int,
    micro_batch_size: int | None,
    max_tokens: int | None,
    has_gradient: np.ndarray,
) -> list[RankBatch]:
    """One `RankBatch` for each data-parallel rank.

    Args:
        batch: the whole rollout.
        num_steps: optimizer steps, as in `batch.steps`.
        micro_batch_size: samples in a micro-batch; None where `max_tokens` bounds its tokens instead.
        has_gradient: bool [B]; False where the loss of a sample is exactly zero whatever the policy, so that it needs
            no forward and backward.

    Raises:
        ValueError: not exactly one of the two bounds is given, or an array does not fit the batch.
    """
    if (micro_batch_size is None) == (max_tokens is None):
        raise ValueError(f"give one of micro_batch_size ({micro_batch_size}) and max_tokens ({max_tokens})")
    has_gradient = np.asarray(has_gradient, dtype=bool)
    if has_gradient.shape != (batch.num_samples,):
        raise ValueError(f"has_gradient has the shape {list(has_gradient.shape)} for {batch.num_samples} samples")
    if batch.num_samples and not 0 <= int(batch.steps.min()) <= int(batch.steps.max()) < num_steps:
        raise ValueError(f"the batch has the steps {np.unique(batch.steps).tolist()}, and num_steps is {num_steps}")
    plans = [
        _plan_step(
            np.flatnonzero((batch.steps == step) & has_gradient),
            batch,
            data_parallel_size,
            micro_batch_size,
            max_tokens,
        )
        for step in range(num_steps)
    ]
    totals = step_totals(batch, num_steps)
    idle = np.flatnonzero(~has_gradient)
    idle_hands = deal(batch.lengths[idle], data_parallel_size)
    filler = _filler_row(batch)
    return [
        _rank_batch(batch, [plan[rank] for plan in plans], idle[idle_hands[rank]], filler, totals)
        for rank in range(data_parallel_size)
    ]


def step_totals(batch: RolloutBatch, num_steps: int) -> list[StepTotals]:
    """[step]: the rollouts and unmasked tokens of each step's global batch."""
    voting = ~np.isnan(batch.raw_rewards)
    rollouts = count_rollouts(batch.rollout_ids, batch.steps, voting)
    tokens = np.bincount(np.repeat(batch.steps, batch.response_lengths), weights=batch.loss_mask, minlength=num_steps)
    return [
        StepTotals(int(rollouts[step]) if step < len(rollouts) else 0, int(tokens[step])) for step in range(num_steps)
    ]


def _plan_step(
    rows: np.ndarray, batch: RolloutBatch, num_ranks: int, micro_batch_size: int | None, max_tokens: int | None
) -> list[list[np.ndarray]]:
    """[rank][micro-batch] -> rows of `batch`; an empty array asks for a filler."""
    lengths = batch.lengths[rows]
    if max_tokens is None:
        packs = pack_by_count(lengths, micro_batch_size, multiple_of=num_ranks)
    else:
        packs = pack_by_tokens(lengths, max_tokens, multiple_of=num_ranks)
    per_rank = -(-len(packs) // num_ranks)
    costs = np.asarray([lengths[pack].sum() for pack in packs], dtype=np.int64)
    hands = deal(costs, num_ranks, limit=per_rank)
    plan = [[rows[packs[position]] for position in hand] for hand in hands]
    empty = np.empty(0, dtype=np.int64)
    return [micro_batches + [empty] * (per_rank - len(micro_batches)) for micro_batches in plan]


def _rank_batch(
    batch: RolloutBatch, plan: list[list[np.ndarray]], idle: np.ndarray, filler: int, totals: list[StepTotals]
) -> RankBatch:
    """Selects a rank's rows, in the order of its micro-batches, then those without a gradient, then its fillers."""
    sizes = [[len(rows) for rows in micro_batches] for micro_batches in plan]
    num_fillers = sum(size == 0 for step_sizes in sizes for size in step_sizes)
    trained = [rows for micro_batches in plan for rows in micro_batches]
    rows = np.concatenate([*trained, idle, np.full(num_fillers, filler)]).astype(np.int64)
    samples = _masked_out(batch.select(rows), num_fillers)
    next_row, next_filler = 0, len(rows) - num_fillers
    micro_batches: list[list[np.ndarray]] = []
    for step_sizes in sizes:
        micro_batches.append([])
        for size in step_sizes:
            if size:
                micro_batches[-1].append(np.arange(next_row, next_row + size))
                next_row += size
            else:
                micro_batches[-1].append(np.asarray([next_filler]))
                next_filler += 1
    return RankBatch(samples=samples, micro_batches=micro_batches, totals=totals)


def _filler_row(batch: RolloutBatch) -> int:
    """The shortest sample that has a response (any step: a filler is masked out)."""
    lengths = np.where(batch.response_lengths > 0, batch.lengths, np.iinfo(np.int64).max)
    return int(lengths.argmin()) if len(lengths) else 0


def _masked_out(samples: RolloutBatch, count: int) -> RolloutBatch:
    """The last `count` samples get mask 0 and loss weight 0, and are marked as without a reward."""
    first = samples.num_samples - count
    samples.loss_mask[samples.response_offsets[first] :] = 0
    samples.loss_weights[first:] = 0.0
    samples.rewards[first:] = 0.0
    samples.raw_rewards[first:] = np.nan
    return samples
