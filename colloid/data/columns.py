"""From `Sample`s to the columns of a `RolloutBatch`: the only place with Python work for each sample.

Here, before the batch is split, is decided everything that depends on the whole global batch:

1. which optimizer step trains a sample: rollouts in order (siblings together), equally many a step;
2. what is masked: a FAILED sample and a removed one have mask 0 at every token;
3. the denominators of the loss: FAILED samples are in none; a rollout that is all masked for another reason counts as
   one rollout with loss 0.

A FAILED sample has the raw reward NaN, which says so in the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colloid.data.batch import RolloutBatch
from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError, DataError


def voting_samples(samples: Sequence[Sample]) -> np.ndarray:
    """bool [B]: False where a sample FAILED, so that it has no vote in its group."""
    return np.fromiter((sample.status is not Status.FAILED for sample in samples), dtype=bool, count=len(samples))


def reward_values(samples: Sequence[Sample], reward_key: str | None = None) -> np.ndarray:
    """float64 [B]: the rewards as numbers; NaN for FAILED samples.

    Raises:
        DataError: a sample that did not fail has no reward, or one that is not finite.
    """
    rewards = np.full(len(samples), np.nan)
    for row, sample in enumerate(samples):
        if sample.status is Status.FAILED:
            continue
        try:
            rewards[row] = sample.get_reward_value(reward_key)
        except (TypeError, ValueError) as error:
            raise DataError(f"the reward of sample {sample.index} is not a number: {error}") from error
        if not np.isfinite(rewards[row]):
            raise DataError(
                f"the reward of sample {sample.index} is {rewards[row]}; it must be finite. "
                "A reward function that cannot judge a sample sets its status to FAILED"
            )
    return rewards


def group_ids(samples: Sequence[Sample]) -> np.ndarray:
    """int64 [B]: `Sample.group_index`.

    Raises:
        DataError: a sample has none.
    """
    return _ids(samples, "group_index", [sample.group_index for sample in samples])


def rollout_ids_of(samples: Sequence[Sample]) -> np.ndarray:
    """int64 [B]: `Sample.rollout_id`, or where it is None the sample's own index."""
    return _ids(samples, "index", [s.index if s.rollout_id is None else s.rollout_id for s in samples])


def to_columns(
    samples: Sequence[Sample],
    *,
    raw_rewards: np.ndarray,
    rewards: np.ndarray,
    num_steps: int = 1,
    per_token_loss: bool = False,
) -> RolloutBatch:
    """The samples of one rollout as columns, in their order.

    Args:
        samples: B of them; their order decides which step trains them.
        raw_rewards: float64 [B], see `reward_values`.
        rewards: float64 [B], shaped by `algorithms.rewards.shape_rewards`.
        num_steps: optimizer steps that the samples are spread over.
        per_token_loss: each unmasked token of a step weighs the same (`--calculate-per-token-loss`), instead of each
            rollout.

    Raises:
        DataError: a sample's arrays do not fit each other, or there are no samples.
        ConfigError: the rollouts cannot be spread equally over the steps.
    """
    if not samples:
        raise DataError("a rollout without samples cannot be trained")
    lengths = np.fromiter((len(sample.tokens) for sample in samples), dtype=np.int64, count=len(samples))
    response_lengths = np.fromiter((sample.response_length for sample in samples), dtype=np.int64, count=len(samples))
    for sample in samples:
        _check_lengths(sample)
    voting = voting_samples(samples)
    response_offsets = _offsets(response_lengths)
    loss_mask = np.concatenate([_loss_mask(sample) for sample in samples])
    unmasked = np.diff(_offsets(loss_mask)[response_offsets])
    rollout_ids = rollout_ids_of(samples)
    rollouts = _rollouts_in_order(rollout_ids)
    steps = _steps(rollouts, num_steps)
    rollout_tokens = np.bincount(rollouts, weights=unmasked).astype(np.int64)[rollouts]
    return RolloutBatch(
        tokens=np.concatenate([np.asarray(sample.tokens, dtype=np.int32) for sample in samples]),
        offsets=_offsets(lengths),
        response_offsets=response_offsets,
        loss_mask=loss_mask,
        rollout_log_probs=np.concatenate([_or_nan(s.rollout_log_probs, s.response_length) for s in samples]),
        weight_versions=np.concatenate([_weight_versions(sample) for sample in samples]),
        sample_ids=_ids(samples, "index", [sample.index for sample in samples]),
        group_ids=group_ids(samples),
        rollout_ids=rollout_ids,
        raw_rewards=np.where(voting, _per_sample("raw_rewards", raw_rewards, len(samples)), np.nan),
        rewards=np.where(voting, _per_sample("rewards", rewards, len(samples)), 0.0),
        steps=steps.astype(np.int32),
        loss_weights=_loss_weights(rollouts, steps, voting, unmasked, rollout_tokens, per_token_loss),
        rollout_tokens=rollout_tokens,
        teacher_log_probs=_teacher_log_probs(samples),
    )


def _loss_weights(
    rollouts: np.ndarray,
    steps: np.ndarray,
    voting: np.ndarray,
    unmasked: np.ndarray,
    rollout_tokens: np.ndarray,
    per_token_loss: bool,
) -> np.ndarray:
    """float64 [B], 0 where the sample has no unmasked token."""
    if per_token_loss:
        denominators = np.bincount(steps, weights=unmasked)[steps]
    else:
        denominators = rollout_tokens * count_rollouts(rollouts, steps, voting)[steps]
    return np.where(unmasked > 0, 1.0 / np.maximum(denominators, 1), 0.0)


def count_rollouts(rollout_ids: np.ndarray, steps: np.ndarray, voting: np.ndarray) -> np.ndarray:
    """int64 [num_steps]: rollouts of each step with at least one sample that did not fail.

    Args:
        rollout_ids: int64 [B]; siblings share one.
        steps: int [B], from 0.
        voting: bool [B], see `voting_samples`.
    """
    rollout_rows = np.unique(rollout_ids[voting], return_index=True)[1]
    return np.bincount(steps[voting][rollout_rows], minlength=int(steps.max(initial=-1)) + 1)


def _rollouts_in_order(rollout_ids: np.ndarray) -> np.ndarray:
    """int64 [B]: rollouts numbered from 0 by their first sample."""
    _, first_rows, inverse = np.unique(rollout_ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first_rows), dtype=np.int64)
    rank[np.argsort(first_rows)] = np.arange(len(first_rows))
    return rank[inverse.reshape(-1)]


def _steps(rollouts: np.ndarray, num_steps: int) -> np.ndarray:
    num_rollouts = int(rollouts.max()) + 1
    if num_steps < 1 or num_rollouts % num_steps:
        raise ConfigError(
            f"{num_rollouts} rollouts cannot be spread equally over {num_steps} optimizer steps: "
            f"{num_rollouts} = {num_steps} x {num_rollouts // max(num_steps, 1)} + {num_rollouts % max(num_steps, 1)}. "
            "Choose --num-steps-per-rollout (or --global-batch-size) so that it divides "
            "--rollout-batch-size x --n-samples-per-prompt"
        )
    return rollouts // (num_rollouts // num_steps)


def _check_lengths(sample: Sample) -> None:
    name, length = f"sample {sample.index}", sample.response_length
    if not 0 <= length <= len(sample.tokens):
        raise DataError(
            f"{name}: response_length is {length}, and there are {len(sample.tokens)} tokens (prompt and response)"
        )
    arrays = {
        "loss_mask": sample.loss_mask,
        "rollout_log_probs": sample.rollout_log_probs,
        "teacher_log_probs": sample.teacher_log_probs,
        "weight_versions": sample.weight_versions or None,
    }
    for field, values in arrays.items():
        if values is not None and len(values) != length:
            raise DataError(f"{name}: {field} has {len(values)} entries for a response of {length} tokens")


def _loss_mask(sample: Sample) -> np.ndarray:
    if sample.status is Status.FAILED or sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.uint8)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, dtype=np.uint8)
    mask = np.asarray(sample.loss_mask, dtype=np.float64)
    if not np.isin(mask, (0.0, 1.0)).all():
        raise DataError(f"sample {sample.index}: loss_mask has entries other than 0 and 1")
    return mask.astype(np.uint8)


def _teacher_log_probs(samples: Sequence[Sample]) -> np.ndarray | None:
    if all(sample.teacher_log_probs is None for sample in samples):
        return None
    return np.concatenate([_or_nan(sample.teacher_log_probs, sample.response_length) for sample in samples])


def _or_nan(log_probs: list[float] | None, length: int) -> np.ndarray:
    return np.asarray([np.nan] * length if log_probs is None else log_probs, dtype=np.float32)


def _weight_versions(sample: Sample) -> np.ndarray:
    if not sample.weight_versions:
        return np.full(sample.response_length, -1, dtype=np.int32)
    return np.asarray(sample.weight_versions, dtype=np.int32)


def _ids(samples: Sequence[Sample], field: str, values: list[int | None]) -> np.ndarray:
    for position, value in enumerate(values):
        if value is None:
            raise DataError(f"the sample at position {position} (index {samples[position].index}) has no {field}")
    return np.asarray(values, dtype=np.int64)


def _per_sample(name: str, values: np.ndarray, count: int) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.shape != (count,):
        raise DataError(f"{name} has the shape {list(values.shape)} for {count} samples")
    return values


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
