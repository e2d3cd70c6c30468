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
5. The packs for log-probs alone, where there are any, hold the same rows of the same step as the rank's
   micro-batches, keep 2, and 3 with a budget of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from colloid.data.batch import RankBatch, RolloutBatch, StepTotals
from colloid.data.columns import count_rollouts
from colloid.data.packing import deal, pack_by_count, pack_by_tokens, split_packs


@dataclass(frozen=True)
class Bounds:
    """What bounds a micro-batch: one of its samples and its tokens.

    Raises:
        ValueError: not exactly one of the two is given, or a bound is less than 1.
    """

    micro_batch_size: int | None = None
    max_tokens: int | None = None
    """Of the ranks that share a sequence together: with context parallelism, that many times the budget of one."""
    log_probs_max_tokens: int | None = None
    """As `max_tokens`, where only log-probs are computed; None: the same packs."""
    length_multiple: int = 1
    """A sequence takes up its length rounded up to a multiple of this (context parallelism pads it)."""

    def __post_init__(self) -> None:
        if (self.micro_batch_size is None) == (self.max_tokens is None):
            raise ValueError(
                f"give one of micro_batch_size ({self.micro_batch_size}) and max_tokens ({self.max_tokens})"
            )
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it is at least 1")

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """int64 [N]: the tokens that sequences take up."""
        return -(-lengths // self.length_multiple) * self.length_multiple


def build_rank_batches(
    batch: RolloutBatch,
    *,
    data_parallel_size: int,
    num_steps: int,
    bounds: Bounds,
    has_gradient: np.ndarray,
    costs: np.ndarray | None = None,
) -> list[RankBatch]:
    """One `RankBatch` for each data-parallel rank.

    Args:
        batch: the whole rollout.
        num_steps: optimizer steps, as in `batch.steps`.
        has_gradient: bool [B]; False where the loss of a sample is exactly zero whatever the policy, so that it needs
            no forward and backward.
        costs: int64 [B], not falling where lengths rise: what is spread evenly over micro-batches and ranks, within
            the bounds. None: the tokens.

    Raises:
        ValueError: an array does not fit the batch.
    """
    has_gradient = np.asarray(has_gradient, dtype=bool)
    costs = bounds.padded(batch.lengths) if costs is None else np.asarray(costs, dtype=np.int64)
    for name, values in (("has_gradient", has_gradient), ("costs", costs)):
        if values.shape != (batch.num_samples,):
            raise ValueError(f"{name} has the shape {list(values.shape)} for {batch.num_samples} samples")
    if batch.num_samples and not 0 <= int(batch.steps.min()) <= int(batch.steps.max()) < num_steps:
        raise ValueError(f"the batch has the steps {np.unique(batch.steps).tolist()}, and num_steps is {num_steps}")
    plans = [
        _plan_step(np.flatnonzero((batch.steps == step) & has_gradient), batch, data_parallel_size, bounds, costs)
        for step in range(num_steps)
    ]
    totals = step_totals(batch, num_steps)
    idle = np.flatnonzero(~has_gradient)
    idle_hands = deal(batch.lengths[idle], data_parallel_size)
    filler = _filler_row(batch)
    ranks = [
        _rank_batch(batch, [plan[rank] for plan in plans], idle[idle_hands[rank]], filler, totals)
        for rank in range(data_parallel_size)
    ]
    return _with_log_prob_packs(ranks, bounds) if bounds.log_probs_max_tokens else ranks


def step_totals(batch: RolloutBatch, num_steps: int) -> list[StepTotals]:
    """[step]: the rollouts and unmasked tokens of each step's global batch."""
    voting = ~np.isnan(batch.raw_rewards)
    rollouts = count_rollouts(batch.rollout_ids, batch.steps, voting)
    tokens = np.bincount(np.repeat(batch.steps, batch.response_lengths), weights=batch.loss_mask, minlength=num_steps)
    return [
        StepTotals(int(rollouts[step]) if step < len(rollouts) else 0, int(tokens[step])) for step in range(num_steps)
    ]


def _plan_step(
    rows: np.ndarray, batch: RolloutBatch, num_ranks: int, bounds: Bounds, costs: np.ndarray
) -> list[list[np.ndarray]]:
    """[rank][micro-batch] -> rows of `batch`; an empty array asks for a filler."""
    lengths, costs = bounds.padded(batch.lengths[rows]), costs[rows]
    if bounds.max_tokens is None:
        packs = pack_by_count(lengths, bounds.micro_batch_size, num_ranks, costs)
    else:
        packs = pack_by_tokens(lengths, bounds.max_tokens, num_ranks, costs)
    per_rank = -(-len(packs) // num_ranks)
    pack_costs = np.asarray([costs[pack].sum() for pack in packs], dtype=np.int64)
    hands = deal(pack_costs, num_ranks, limit=per_rank)
    plan = [[rows[packs[position]] for position in hand] for hand in hands]
    empty = np.empty(0, dtype=np.int64)
    return [micro_batches + [empty] * (per_rank - len(micro_batches)) for micro_batches in plan]


def _with_log_prob_packs(ranks: list[RankBatch], bounds: Bounds) -> list[RankBatch]:
    """Packs each rank's trained rows anew, equally many packs on all ranks; never more than its micro-batches."""
    schedules: list[list[list[np.ndarray]]] = [[] for _ in ranks]
    for step, trained in enumerate(ranks[0].micro_batches):
        rows = [np.concatenate([*rank.micro_batches[step], np.empty(0, np.int64)]).astype(np.int64) for rank in ranks]
        lengths = [bounds.padded(rank.samples.lengths[own]) for rank, own in zip(ranks, rows, strict=True)]
        packs = [pack_by_tokens(own, bounds.log_probs_max_tokens) for own in lengths]
        most = max(len(own) for own in packs)
        for rank, schedule in enumerate(schedules):
            if most >= len(trained):
                schedule.append(ranks[rank].micro_batches[step])
            else:
                split = split_packs(packs[rank], lengths[rank], most)
                schedule.append([rows[rank][pack] for pack in split])
    return [replace(rank, log_prob_micro_batches=own) for rank, own in zip(ranks, schedules, strict=True)]


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
