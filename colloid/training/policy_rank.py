"""What a rank of the policy computes before a rollout's first optimizer step: log-probs of the reference, of a teacher
and of the policy itself, advantages and returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from colloid.data.batch import RankBatch, RolloutBatch
from colloid.training.advantages import step_advantages, step_returns, teacher_gaps
from colloid.training.base import TrainerRank, take_rows
from colloid.training.loss_options import advantage_config, loss_choice
from colloid.training.megatron import parallel, step
from colloid.training.megatron.routing_replay import RolloutRouting, RoutedPass, RoutingReplay
from colloid.training.micro_batch import MicroBatch, regroup
from colloid.training.reference import ReferenceModel
from colloid.training.steps import Step
from colloid.training.synced_weights import SyncedWeights
from colloid.training.trainer_hooks import TrainerHooks


class PolicyRank(TrainerRank):
    """One rank. A subclass sets the other weights that the options ask for, once there is a model."""

    _reference: ReferenceModel | None = None
    _teacher: ReferenceModel | None = None
    _old_actor: SyncedWeights | None = None
    _replay: RoutingReplay | None = None

    def __init__(self, args: Any, rank: int, world_size: int, init_method: str):
        super().__init__(args, rank, world_size, init_method)
        self._loss = loss_choice(args)
        self._objective = self._loss.objective
        self._sft, self._custom = (self._loss.kind == kind for kind in ("sft_loss", "custom_loss"))
        self._head = step.Head(1.0 if self._sft else args.rollout_temperature, args.log_probs_chunk_size)
        self._advantage = advantage_config(args)
        self._computes_advantages = args.compute_advantages_and_returns
        self._hooks = TrainerHooks(args)

    def _other_weights(self) -> Iterator[torch.Tensor]:
        for model in (self._reference, self._teacher, self._old_actor):
            yield from model.tensors if model else ()

    def _prepare(self, rollout_id: int, batch: RankBatch, values: np.ndarray | None = None) -> list[Step]:
        """Everything that comes before a rollout's first step."""
        self.resume()
        steps = self._micro_batches(batch, batch.micro_batches)
        passes = self._micro_batches(batch, batch.log_prob_micro_batches) or steps
        self._routing = RolloutRouting(self._replay, len(batch.samples.tokens), batch.samples.routed_experts)
        reference = self._log_probs_of(self._reference, "ref_", steps, passes)
        teacher = self._teacher_log_probs(steps, passes)
        old = self._old_log_probs(batch.samples, steps, passes)
        prepared = []
        for index, micro_batches in enumerate(steps):
            of_pass, entropy = old[index]
            behaviour = self._behaviour(micro_batches, of_pass)
            of_critic = None if values is None else take_rows(values, micro_batches)
            known = {"old": behaviour, "reference": reference[index], "values": of_critic}
            has_returns = bool(of_critic) and parallel.is_last_stage()
            returns = step_returns(self._advantage, micro_batches, **known) if has_returns else []
            advantages = self._advantages(micro_batches, teacher=teacher[index], entropy=entropy, **known)
            gaps = teacher_gaps(micro_batches, behaviour, teacher[index])
            before = of_pass if index or self._reads_old else None
            if self._custom:
                before = behaviour
            totals = batch.totals[index] if batch.totals else None
            prepared.append(Step(micro_batches, totals, before, reference[index], advantages, returns, gaps, entropy))
        if parallel.is_last_stage():
            prepared = self._hooks.after_log_probs(rollout_id, dist.get_rank(), prepared)
        return prepared

    def _log_probs(
        self, micro_batches: list[MicroBatch], passes: list[MicroBatch], routed: RoutedPass | None = None
    ) -> list[torch.Tensor]:
        """Log-probs of each of `micro_batches`, computed in the packs `passes` of the same samples."""
        if not passes:
            return []
        return regroup(step.compute_log_probs(self._chunks, passes, self._head, routed), passes, micro_batches)

    def _log_probs_and_entropies(
        self, micro_batches: list[MicroBatch], passes: list[MicroBatch], routed: RoutedPass | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """As `_log_probs`, with the entropies where `--use-rollout-entropy` asks for them."""
        if not passes or not self.args.use_rollout_entropy:
            return self._log_probs(micro_batches, passes, routed), None
        found = step.compute_log_probs_and_entropies(self._chunks, passes, self._head, routed)
        log_probs, entropies = (regroup(values, passes, micro_batches) for values in found)
        return log_probs, entropies

    def _log_probs_of(
        self, model: ReferenceModel | None, prefix: str, steps: list[list[MicroBatch]], passes: list[list[MicroBatch]]
    ) -> list[list[torch.Tensor] | None]:
        """Log-probs of the reference or teacher, of each step; None where there is no such model. They choose their
        experts themselves.
        """
        if model is None:
            return [None for _ in steps]
        with model.swapped_in():
            self._hooks.before_log_prob(self._chunks, prefix)
            return [self._log_probs(micro_batches, passes[index]) for index, micro_batches in enumerate(steps)]

    def _teacher_log_probs(
        self, steps: list[list[MicroBatch]], passes: list[list[MicroBatch]]
    ) -> list[list[torch.Tensor] | None]:
        """As `_log_probs_of`, of the teacher; those of one behind an engine came with the batch."""
        if self._teacher or not self._advantage.distills:
            return self._log_probs_of(self._teacher, "teacher_", steps, passes)
        if not parallel.is_last_stage():
            return [[] for _ in steps]
        return [[micro_batch.teacher_log_probs for micro_batch in micro_batches] for micro_batches in steps]

    def _old_log_probs(
        self, samples: RolloutBatch, steps: list[list[MicroBatch]], passes: list[list[MicroBatch]]
    ) -> list[tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]]:
        """The trainer's log-probs before the rollout's first step, of the steps that need them, and the entropies where
        they are asked for; with `--keep-old-actor` those of the newest weights that generated any of it.
        """
        recomputed = [bool(self._old_actor) or self._recomputes(index) for index in range(len(steps))]
        weights = nullcontext()
        if self._old_actor:
            newest = parallel.largest(int(samples.weight_versions.max(initial=-1)))
            weights = self._old_actor.of(newest).swapped_in()
        with weights:
            if any(recomputed):
                self._hooks.before_log_prob(self._chunks, "")
            return [
                self._log_probs_and_entropies(micro_batches, passes[index], self._routing.before(index))
                if recomputed[index]
                else (None, None)
                for index, micro_batches in enumerate(steps)
            ]

    @property
    def _reads_old(self) -> bool:
        """Whether a rollout's first step takes the log-probs of before it from elsewhere than its own forward pass."""
        return bool(self._old_actor) or self._hooks.sees_log_probs

    def _recomputes(self, index: int) -> bool:
        """Whether a step needs the trainer's log-probs before the first step. The first one's are those of its own
        forward pass: nothing was trained in between.
        """
        if self.args.use_rollout_entropy:
            return True
        if self._sft or not self._computes_advantages:
            return False
        if self._objective.use_rollout_logprobs:
            compares, notes = self._objective.correction.compares_with_engine, self.args.use_routing_replay
            return index > 0 and bool(compares or notes)
        return index > 0 or self._advantage.needs_log_probs or self._custom or self._hooks.sees_log_probs

    def _behaviour(
        self, micro_batches: list[MicroBatch], recomputed: list[torch.Tensor] | None
    ) -> list[torch.Tensor] | None:
        """The behaviour policy's log-probs of a step's micro-batches, where they are known before it."""
        if self._objective.use_rollout_logprobs and parallel.is_last_stage():
            return [engine_log_probs(micro_batch) for micro_batch in micro_batches]
        return recomputed

    def _advantages(
        self,
        micro_batches: list[MicroBatch],
        *,
        old: list[torch.Tensor] | None,
        reference: list[torch.Tensor] | None,
        teacher: list[torch.Tensor] | None,
        entropy: list[torch.Tensor] | None,
        values: list[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Of a step's micro-batches; where the loss is computed."""
        if not parallel.is_last_stage() or not self._computes_advantages:
            return []
        return step_advantages(
            self._advantage,
            micro_batches,
            old=old,
            reference=reference,
            teacher=teacher,
            entropy=entropy,
            values=values,
            sum_over_ranks=parallel.sum_over_data_parallel,
        )


def engine_log_probs(micro_batch: MicroBatch) -> torch.Tensor:
    """[R], the engine's; 0 where no sample has any, as then all are masked."""
    found = micro_batch.rollout_log_probs
    return micro_batch.token_weights.new_zeros(len(micro_batch.loss_mask)) if found is None else found
