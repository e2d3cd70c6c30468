"""Functions that users bring for advantages and for the correction of the policy loss, on packed micro-batches.

They see samples: lists with a tensor over the response tokens of each, as hooks of this field do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colloid.algorithms.corrections import CorrectionInputs, CustomCorrection, Measured
from colloid.errors import HookError
from colloid.training.micro_batch import MicroBatch
from colloid.training.steps import Lists, by_sample, flat, named, shown


def custom_correction(function: Callable[..., Any], micro_batch: MicroBatch) -> CustomCorrection:
    """`--custom-tis-function-path` on the samples of this micro-batch.

    Args:
        function: with `args` bound; called with keywords, returns (pg_loss [R], loss masks or None, metrics). A metric
            is a tensor [R], a list with a tensor for each sample, or a number; it is averaged with the token weights.

    Raises:
        HookError: what it returned does not fit.
    """

    def correction(loss: torch.Tensor, inputs: CorrectionInputs) -> tuple[torch.Tensor, torch.Tensor, Measured]:
        if inputs.trainer_log_probs is None or inputs.rollout_log_probs is None:
            return loss, inputs.loss_mask, {}
        returned = function(
            pg_loss=loss,
            train_log_probs=by_sample(inputs.trainer_log_probs, micro_batch),
            rollout_log_probs=by_sample(inputs.rollout_log_probs, micro_batch),
            loss_masks=by_sample(inputs.loss_mask.to(loss.dtype), micro_batch),
            total_lengths=micro_batch.lengths.tolist(),
            response_lengths=micro_batch.response_lengths.tolist(),
        )
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise HookError(f"{named(function)} must return (pg_loss, loss_masks, metrics), not {shown(returned)}")
        corrected, masks, metrics = returned
        kept = inputs.loss_mask
        if masks is not None:
            kept = kept & (flat(masks, loss, function, "loss_masks") != 0)
        measured = {
            name: (flat(values, loss, function, f"the metric {name}"), inputs.loss_mask)
            for name, values in (metrics or {}).items()
        }
        return flat(corrected, loss, function, "pg_loss"), kept, measured

    return correction


def custom_advantages(
    function: Callable[..., Any],
    micro_batches: Sequence[MicroBatch],
    known: Mapping[str, Sequence[torch.Tensor] | None],
) -> list[torch.Tensor]:
    """`--custom-advantage-function-path` on all samples of a step that this rank trains.

    `rollout_data` has, with an entry for each sample: `rewards` (shaped), `loss_masks`, `response_lengths`,
    `total_lengths`, and where they are known `log_probs`, `ref_log_probs`, `rollout_log_probs`, `teacher_log_probs`,
    `entropy`. The function sets `advantages` (and may set `returns`): a tensor over the response tokens of each sample.

    Args:
        known: key -> [R] of each micro-batch; None: not known.

    Returns:
        float64 [R] of each micro-batch, 0 at masked tokens.

    Raises:
        HookError: what it set does not fit.
    """
    data: Lists = {
        "rewards": [reward for part in micro_batches for reward in part.rewards.tolist()],
        "loss_masks": _joined([part.loss_mask.to(torch.float32) for part in micro_batches], micro_batches),
        "response_lengths": [length for part in micro_batches for length in part.response_lengths.tolist()],
        "total_lengths": [length for part in micro_batches for length in part.lengths.tolist()],
    }
    data |= {key: _joined(values, micro_batches) for key, values in known.items() if values}
    rollout = [part.rollout_log_probs for part in micro_batches]
    if all(values is not None for values in rollout):
        data["rollout_log_probs"] = _joined(rollout, micro_batches)
    function(data)
    advantages = data.get("advantages")
    if not isinstance(advantages, list) or len(advantages) != len(data["rewards"]):
        raise HookError(
            f"{named(function)} must set rollout_data['advantages'] to a list with a tensor for each of the "
            f"{len(data['rewards'])} samples; it is {shown(advantages)}"
        )
    results, first = [], 0
    for part in micro_batches:
        own = flat(advantages[first : first + part.num_samples], part.loss_mask.double(), function, "advantages")
        results.append(torch.where(part.loss_mask, own.to(torch.float64), 0.0))
        first += part.num_samples
    return results


def _joined(values: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    return [own for column, part in zip(values, micro_batches, strict=True) for own in by_sample(column, part)]
