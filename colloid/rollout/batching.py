"""From a rollout's samples to each rank's micro-batches, as the options ask: columns, bounds, what is balanced."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from colloid.algorithms.estimators import Credit, get_estimator
from colloid.algorithms.rewards import shape_rewards
from colloid.config.algorithm import has_teacher_engine
from colloid.config.layout import data_parallel_size
from colloid.data.batch import RankBatch, RolloutBatch
from colloid.data.columns import group_ids, reward_values, rollout_ids_of, to_columns, voting_samples
from colloid.data.routing import routed_experts
from colloid.data.sample import Sample
from colloid.data.schedule import Bounds, build_rank_batches
from colloid.errors import DataError
from colloid.rollout.convert import converted_batch
from colloid.rollout.costs import sequence_costs
from colloid.rollout.options import routing_shape
from colloid.rollout.post_process import post_processed

NUM_EXAMPLES = 4


@dataclass(frozen=True)
class RolloutResult:
    """One rollout, ready for the trainer."""

    batches: list[RankBatch]
    """One a data-parallel rank."""
    metrics: dict[str, float]
    examples: list[dict[str, Any]]
    """A few samples: prompt, response, label, reward, status."""


def rollout_result(args: Any, samples: list[Sample], batch: RolloutBatch) -> RolloutResult:
    """The samples scheduled, without metrics. Where there is no trainer (`--debug-rollout-only`), no batches."""
    batches = [] if args.debug_rollout_only else schedule(args, batch)
    return RolloutResult(batches, {}, [example(sample) for sample in samples[:NUM_EXAMPLES]])


def schedule(args: Any, batch: RolloutBatch) -> list[RankBatch]:
    """One `RankBatch` for each data-parallel rank, as the options ask."""
    return build_rank_batches(
        batch,
        data_parallel_size=data_parallel_size(args),
        num_steps=args.num_steps_per_rollout,
        bounds=micro_batch_bounds(args),
        has_gradient=has_gradient(args, batch),
        costs=sequence_costs(args, batch.lengths) if args.balance_by_flops else None,
    )


def rollout_batch(args: Any, samples: list[Sample]) -> RolloutBatch:
    """The samples as columns, their rewards shaped by the estimator's baseline.

    With `--custom-convert-samples-to-train-data-path`: the columns of the rows that the function makes of them.

    Raises:
        HookError: the function returned something else.
        DataError: a token that is trained lacks what the options need of it.
    """
    if args.custom_convert_samples_to_train_data_path:
        samples, batch = _converted(args, samples)
    else:
        batch = _columns(args, samples)
    if args.use_rollout_logprobs:
        _check_rollout_log_probs(batch)
    if has_teacher_engine(args):
        _check_teacher_log_probs(batch)
    if args.use_rollout_routing_replay:
        batch = replace(batch, routed_experts=routed_experts(samples, batch, routing_shape(args)))
    return batch


def _converted(args: Any, samples: list[Sample]) -> tuple[list[Sample], RolloutBatch]:
    from colloid.hooks import bind, load_hook

    path = args.custom_convert_samples_to_train_data_path
    return converted_batch(
        bind(load_hook(path, "custom_convert_samples"), args),
        f"--custom-convert-samples-to-train-data-path {path}",
        samples,
        num_steps=args.num_steps_per_rollout,
        per_token_loss=bool(args.calculate_per_token_loss),
    )


def _columns(args: Any, samples: list[Sample]) -> RolloutBatch:
    raw, shaped = shaped_rewards(args, samples)
    return to_columns(
        samples,
        raw_rewards=raw,
        rewards=shaped,
        num_steps=args.num_steps_per_rollout,
        per_token_loss=bool(args.calculate_per_token_loss),
    )


def shaped_rewards(args: Any, samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """float64 [B] twice: rewards as they were given, and as the estimator's baseline (or the user's function) shapes
    them."""
    if args.custom_reward_post_process_path and rewarded(args):
        return post_processed(args, samples)
    raw = reward_values(samples, args.reward_key) if rewarded(args) else np.zeros(len(samples))
    shaped = shape_rewards(
        torch.from_numpy(raw),
        torch.from_numpy(group_ids(samples)),
        args.advantage_estimator,
        valid=torch.from_numpy(voting_samples(samples)),
        std_normalization=args.grpo_std_normalization,
        normalize=args.rewards_normalization,
        rollout_ids=torch.from_numpy(rollout_ids_of(samples)),
    )
    return raw, shaped.numpy()


def rewarded(args: Any) -> bool:
    """Whether rewards decide what is trained."""
    return args.loss_type != "sft_loss"


def _check_rollout_log_probs(batch: RolloutBatch) -> None:
    """
    Raises:
        DataError: a token that is trained has no log-prob of the engine.
    """
    if missing := _without(batch, batch.rollout_log_probs, "rollout log-probs"):
        raise DataError(
            f"--use-rollout-logprobs, and {missing}. Have the generate function record them "
            "(`append_response_tokens(…, log_probs=…)`), or leave the option out"
        )


def _check_teacher_log_probs(batch: RolloutBatch) -> None:
    """
    Raises:
        DataError: a token that is trained has no log-prob of the teacher.
    """
    log_probs = batch.teacher_log_probs
    if log_probs is None:
        log_probs = np.full(len(batch.loss_mask), np.nan)
    if missing := _without(batch, log_probs, "teacher_log_probs"):
        raise DataError(
            f"--opd-type sglang, and {missing}. Rollouts from disk have them where the run that saved them had such a "
            "teacher, and what --custom-convert-samples-to-train-data-path makes has them where it returns "
            "teacher_log_probs"
        )


def _without(batch: RolloutBatch, log_probs: np.ndarray, what: str) -> str:
    """Says which samples have a trained token whose log-prob is NaN; empty: none."""
    missing = np.isnan(log_probs) & (batch.loss_mask == 1)
    rows = np.unique(np.searchsorted(batch.response_offsets, np.flatnonzero(missing), side="right") - 1)
    if not len(rows):
        return ""
    named = f"{batch.sample_ids[rows[:5]].tolist()}{' …' if len(rows) > 5 else ''}"
    return f"{len(rows)} of {batch.num_samples} samples have no {what}: {named}"


def has_gradient(args: Any, batch: RolloutBatch) -> np.ndarray:
    """bool [B]: False where a sample's loss is exactly zero whatever the policy, so that it needs no backward."""
    unmasked = batch.loss_weights > 0
    estimator = get_estimator(args.advantage_estimator)
    by_reward_alone = (
        estimator.credit is Credit.BROADCAST
        and not (estimator.kl_in_rewards and args.kl_coef)
        and not estimator.always_whitens
        and not args.normalize_advantages
        and not args.custom_advantage_function_path
        and not (args.use_tis and args.custom_tis_function_path)
        and not args.rollout_data_postprocess_path
        and not (args.use_kl_loss and args.kl_loss_coef)
        and not args.entropy_coef
        and args.loss_type == "policy_loss"
        and not args.use_opd
        and not args.num_experts
    )
    return unmasked & (batch.rewards != 0.0) if by_reward_alone else unmasked


def example(sample: Sample) -> dict[str, Any]:
    """What a person wants to see of a sample."""
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
    }


def micro_batch_bounds(args: Any) -> Bounds:
    """The bounds of a micro-batch. The ranks of context parallelism share its tokens, so their budgets add up."""
    context = args.context_parallel_size
    chunk = 2 * context if context > 1 else 1
    # A pack is padded to a multiple of this; so it still fits when it is full. Less than one unit holds no two samples.
    unit = math.lcm(chunk, context * args.tensor_model_parallel_size if args.sequence_parallel else 1)

    def budget(tokens: int | None) -> int | None:
        return None if tokens is None else tokens * context // unit * unit or 1

    return Bounds(
        micro_batch_size=None if args.use_dynamic_batch_size else args.micro_batch_size,
        max_tokens=budget(args.max_tokens_per_gpu),
        log_probs_max_tokens=budget(args.log_probs_max_tokens_per_gpu),
        length_multiple=chunk,
    )
