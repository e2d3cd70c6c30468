"""The loss of a step's micro-batches, as the options ask for it: the policy's, that of SFT, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from colloid.algorithms.objective import Metrics, ObjectiveConfig, ObjectiveInputs, objective
from colloid.algorithms.segments import masked
from colloid.algorithms.sft import sft_objective
from colloid.errors import HookError
from colloid.training.custom import custom_correction
from colloid.training.micro_batch import MicroBatch
from colloid.training.steps import Step, by_sample, flat, named, sample_lists, shown


@dataclass(frozen=True)
class LossChoice:
    """Which loss. The functions are the user's, with `args` bound."""

    kind: str
    """`policy_loss`, `sft_loss` or `custom_loss`."""
    objective: ObjectiveConfig
    per_token: bool = False
    """Every token weighs the same, rather than every rollout."""
    custom_loss: Callable[..., Any] | None = None
    custom_tis: Callable[..., Any] | None = None
    reducer: Callable[..., Any] | None = None
    """Of the policy loss."""


@dataclass(frozen=True)
class StepLoss:
    """The loss of each micro-batch of a step; called as a `MicroBatchLoss`."""

    choice: LossChoice
    step: Step
    trainer_known: bool
    """Whether the trainer's log-probs before the rollout's first step are known."""
    share: float
    """A micro-batch's share of the step: 1 / (its micro-batches on all ranks)."""

    def __call__(
        self, row: int, micro_batch: MicroBatch, head: torch.Tensor, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, Metrics]:
        """
        Args:
            head: log-probs [R]; for a custom loss logits [R, V].
        """
        if self.choice.kind == "sft_loss":
            return sft_objective(head, micro_batch.loss_mask, micro_batch.token_weights, self.share)
        if self.choice.kind == "custom_loss":
            value, measured = self._custom(row, micro_batch, head)
            return value, measured | self._measured_before(row, micro_batch)
        step, choice = self.step, self.choice
        inputs = ObjectiveInputs(
            log_probs=head,
            advantages=step.advantages[row],
            sample_index=micro_batch.sample_index,
            loss_mask=micro_batch.loss_mask,
            token_weights=micro_batch.token_weights,
            num_samples=micro_batch.num_samples,
            old_log_probs=step.old[row] if step.old else None,
            trainer_known=self.trainer_known,
            ref_log_probs=step.reference[row] if step.reference else None,
            rollout_log_probs=micro_batch.rollout_log_probs,
            entropy=entropy,
            custom_correction=custom_correction(choice.custom_tis, micro_batch) if choice.custom_tis else None,
            policy_reducer=self._reducer(micro_batch) if choice.reducer else None,
            share=self.share,
        )
        value, measured = objective(inputs, choice.objective)
        return value, measured | self._measured_before(row, micro_batch)

    def _measured_before(self, row: int, micro_batch: MicroBatch) -> Metrics:
        """Means over tokens of what was known before the step."""
        mask, weights = micro_batch.loss_mask, micro_batch.token_weights.to(torch.float64)
        known = {"opd_kl": self.step.gaps, "rollout_entropy": self.step.entropy}
        return {
            name: ((weights * masked(values[row], mask)).sum(), weights.sum())
            for name, values in known.items()
            if values
        }

    def _custom(self, row: int, micro_batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        """`--custom-loss-function-path`."""
        function = self.choice.custom_loss
        weights = micro_batch.token_weights.to(logits.dtype)

        def sum_of_sample_mean(values: Any) -> torch.Tensor:
            values = flat(values, weights, function, "what sum_of_sample_mean is given")
            return (weights * masked(values, micro_batch.loss_mask)).sum()

        returned = function(loss_batch(self.step, row), logits, sum_of_sample_mean)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], torch.Tensor):
            raise HookError(f"{named(function)} must return (loss, metrics), not {shown(returned)}")
        loss, metrics = returned
        if loss.numel() != 1 or not loss.requires_grad:
            raise HookError(
                f"{named(function)} must return a loss of one number with gradient; it has the shape "
                f"{list(loss.shape)} and {'a' if loss.requires_grad else 'no'} gradient"
            )
        loss = loss.reshape(())
        share = torch.tensor(self.share, dtype=torch.float64, device=loss.device)
        sums: Metrics = {"loss": (loss.detach().to(torch.float64), share)}
        for name, value in (metrics or {}).items():
            value = torch.as_tensor(value, device=loss.device).detach().to(torch.float64)
            if value.numel() != 1:
                raise HookError(
                    f"{named(function)}: the metric {name} has the shape {list(value.shape)}; reduce it with "
                    "sum_of_sample_mean"
                )
            sums[name] = (value.reshape(()), share)
        return loss, sums

    def _reducer(self, micro_batch: MicroBatch) -> Callable[[torch.Tensor], torch.Tensor]:
        """`--custom-pg-loss-reducer-function-path`, divided by the denominator of the step's global batch."""
        function, totals = self.choice.reducer, self.step.totals
        denominator = max(1, totals.num_tokens if self.choice.per_token else totals.num_rollouts)

        def reduce(loss: torch.Tensor) -> torch.Tensor:
            if not micro_batch.loss_mask.any():
                return (loss * 0.0).sum()
            reducer = function(
                micro_batch.lengths.tolist(),
                micro_batch.response_lengths.tolist(),
                by_sample(micro_batch.loss_mask.to(loss.dtype), micro_batch),
                self.choice.per_token,
            )
            if not callable(reducer):
                raise HookError(f"{named(function)} must return a function of a tensor, not {shown(reducer)}")
            reduced = reducer(loss)
            if not isinstance(reduced, torch.Tensor) or reduced.numel() != 1:
                raise HookError(f"{named(function)}: what it returned must reduce a tensor to one number")
            return reduced.reshape(()) / denominator

        return reduce


def loss_batch(step: Step, row: int) -> dict[str, Any]:
    """What a custom loss sees of a micro-batch: `sample_lists`, but `tokens` packed, int64 [1, all tokens], and the
    lists of it under `unconcat_tokens`.
    """
    lists = sample_lists(step, row)
    lists["unconcat_tokens"] = lists["tokens"]
    return lists | {"tokens": step.micro_batches[row].sample_tokens[None]}
