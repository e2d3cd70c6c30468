"""What is logged of a rollout, and the alarms: all rewards equal, samples that failed."""

from __future__ import annotations

import logging

import numpy as np

from colloid.data.batch import RolloutBatch
from colloid.data.ledger import FORKED, REWRITTEN
from colloid.data.sample import Sample, Status
from colloid.rollout.conversation import TEXT_ONLY
from colloid.rollout.filters import TOLERANCE

logger = logging.getLogger(__name__)


def rollout_metrics(
    samples: list[Sample],
    batch: RolloutBatch,
    *,
    seconds: float | None,
    weight_version: int | None,
    rewarded: bool = True,
) -> dict[str, float]:
    """`rollout/…` and `perf/…` of the samples that will be trained. What was not measured is not in it."""
    valid = ~np.isnan(batch.raw_rewards)
    lengths = batch.response_lengths
    sampled = batch.loss_mask.astype(bool)
    metrics = {
        "rollout/response_length": float(lengths.mean()),
        "rollout/response_length/max": float(lengths.max()),
        "rollout/response_length/min": float(lengths.min()),
        "rollout/prompt_length": float((batch.lengths - lengths).mean()),
        "rollout/truncated_ratio": float(np.mean([sample.status is Status.TRUNCATED for sample in samples])),
        "rollout/num_failed_samples": float((~valid).sum()),
        "rollout/num_removed_samples": float(sum(sample.remove_sample for sample in samples)),
    }
    text_only = sum(bool(sample.metadata.get(TEXT_ONLY)) for sample in samples)
    if text_only:
        metrics["rollout/num_text_only_samples"] = float(text_only)
    if seconds is not None:
        metrics["perf/rollout_time"] = seconds
        metrics["perf/rollout_tokens_per_sec"] = float(lengths.sum()) / seconds
    if rewarded and valid.any():
        metrics["rollout/raw_reward"] = float(batch.raw_rewards[valid].mean())
        metrics["rollout/raw_reward/max"] = float(batch.raw_rewards[valid].max())
        metrics["rollout/raw_reward/min"] = float(batch.raw_rewards[valid].min())
        metrics["rollout/zero_std_groups"] = _equal_groups(batch, valid)
    known = sampled & (batch.weight_versions >= 0)
    if weight_version is not None and known.any():
        metrics["rollout/off_policy_token_ratio"] = float((batch.weight_versions[known] != weight_version).mean())
    return metrics


def multi_turn_metrics(samples: list[Sample], batch: RolloutBatch) -> dict[str, float]:
    """`multi_turn/…`: of each sample the turns (runs of sampled tokens) and the tokens between and behind them."""
    mask = batch.loss_mask.astype(np.int64)
    starts = np.diff(mask, prepend=0) == 1
    starts[batch.response_offsets[:-1][batch.response_lengths > 0]] = False
    first = np.zeros(batch.num_samples, dtype=np.int64)
    filled = batch.response_lengths > 0
    first[filled] = mask[batch.response_offsets[:-1][filled]]
    turns = _sums(starts, batch.response_offsets) + first
    inserted = _sums(mask == 0, batch.response_offsets)
    metrics = {
        "multi_turn/branches": float(sum(bool(sample.metadata.get(FORKED)) for sample in samples)),
        "multi_turn/rewritten_turns": float(
            sum(sample.metadata.get(REWRITTEN, 0) for sample in samples if not sample.metadata.get(FORKED))
        ),
    }
    for name, values in (("turns", turns), ("inserted_tokens", inserted)):
        for way in ("mean", "max", "min"):
            metrics[f"multi_turn/{name}/{way}"] = float(getattr(values, way)())
    return metrics


def _sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64 [B]: of each sample the sum over its response tokens."""
    totals = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return totals[offsets[1:]] - totals[offsets[:-1]]


def warn_of_failures(samples: list[Sample], rollout_id: int) -> None:
    """Warns, with the text of a sample, where all of them FAILED."""
    if not samples or any(sample.status is not Status.FAILED for sample in samples):
        return
    sample = samples[0]
    logger.warning(
        "rollout %d: all %d samples FAILED. Sample %s: %s\n  prompt:   %s\n  response: %s (%d tokens)\n  label:    %s",
        *(rollout_id, len(samples), sample.index, sample.metadata.get("error"), _head(sample.prompt)),
        *(_head(sample.response), sample.response_length, _head(sample.label)),
    )


def warn_of_useless_rewards(samples: list[Sample], batch: RolloutBatch, rollout_id: int) -> None:
    """Warns, with the text of a sample, where all rewards are equal: nothing can be learned from them."""
    rewards = batch.raw_rewards[~np.isnan(batch.raw_rewards)]
    if len(rewards) < 2 or rewards.max() - rewards.min() > TOLERANCE:
        return
    sample = next(sample for sample in samples if sample.status is not Status.FAILED)
    logger.warning(
        "rollout %d: the rewards of all %d samples are %g, so nothing can be learned from them. Sample %s:\n"
        "  prompt:   %s\n  response: %s (%d tokens, %s)\n  label:    %s",
        *(rollout_id, len(rewards), rewards[0], sample.index, _head(sample.prompt), _head(sample.response)),
        *(sample.response_length, sample.status.value, _head(sample.label)),
    )


def _equal_groups(batch: RolloutBatch, valid: np.ndarray) -> float:
    """The share of groups, among those with a valid reward, whose valid rewards are all equal."""
    groups, rows = np.unique(batch.group_ids[valid], return_inverse=True)
    highest, lowest = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.maximum.at(highest, rows, batch.raw_rewards[valid])
    np.minimum.at(lowest, rows, batch.raw_rewards[valid])
    return float((highest - lowest <= TOLERANCE).mean())


def _head(value: object, limit: int = 500) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
