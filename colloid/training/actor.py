"""A trainer rank: the policy, its optimizer and its reference, as four verbs (`train`, `save`, `update_weights`,
`weight_checksums`). Each is called on all ranks at once. No Ray in here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from colloid.config.model import is_torch_dist
from colloid.data.batch import RankBatch, RolloutBatch
from colloid.engines.control import EngineAddress, EngineControl
from colloid.errors import ColloidError, WeightSyncError
from colloid.training.advantages import step_advantages, step_returns, teacher_gaps
from colloid.training.base import TrainerRank, put_rows, take_rows, train_metrics
from colloid.training.loss_options import advantage_config, loss_choice
from colloid.training.megatron import checkpoint, parallel, step
from colloid.training.megatron.logits_head import LogitsHead
from colloid.training.megatron.model import build_model, name_map, named_parameters
from colloid.training.megatron.optimizer import build_optimizer, build_scheduler, reset_states
from colloid.training.megatron.routing_replay import RolloutRouting, RoutedPass, RoutingReplay
from colloid.training.megatron.shards import weight_coordinates
from colloid.training.micro_batch import MicroBatch, regroup
from colloid.training.reference import ReferenceModel
from colloid.training.step_loss import StepLoss
from colloid.training.steps import Step
from colloid.training.synced_weights import SyncedWeights
from colloid.training.trainer_hooks import TrainerHooks
from colloid.weights.buckets import make_buckets
from colloid.weights.export import Exporter
from colloid.weights.hf_directory import write_hf_directory
from colloid.weights.hf_loader import HFCheckpoint, load_parameters
from colloid.weights.tensor_transport import EngineUpdate, checksum

logger = logging.getLogger(__name__)

UPDATE_TIMEOUT = 300.0
"""Seconds that one control call of a weight update may take."""


REFERENCE_DIRECTORY = "reference"
"""In the trainer's part of a checkpoint, where `--ref-update-interval` changes the reference."""


@dataclass(frozen=True)
class StartState:
    """Where a run begins."""

    start_rollout_id: int
    weight_version: int


class Actor(TrainerRank):
    """One rank."""

    def __init__(self, args: Any, rank: int, world_size: int, init_method: str):
        super().__init__(args, rank, world_size, init_method)
        self._weight_version = 0
        self._loss = loss_choice(args)
        self._objective = self._loss.objective
        self._sft, self._custom = (self._loss.kind == kind for kind in ("sft_loss", "custom_loss"))
        self._head = step.Head(1.0 if self._sft else args.rollout_temperature, args.log_probs_chunk_size)
        self._advantage = advantage_config(args)
        self._computes_advantages = args.compute_advantages_and_returns
        self._hooks = TrainerHooks(args)

    def start(self) -> StartState:
        """Builds the model, and loads the start weights or the checkpoint that the run resumes from."""
        args = self.args
        self._chunks = build_model(args)
        self._parameters = named_parameters(self._chunks)
        self._names = name_map(args)
        parallel.mark_shards(self._parameters, self._names)
        if not args.resume_from:
            self._load_weights(args.init_checkpoint)
        self._optimizer = build_optimizer(args, self._chunks)
        self._scheduler = build_scheduler(args, self._optimizer)
        self._reference = None
        if self._objective.use_kl_loss or self._advantage.needs_reference:
            place = self._updated_reference() or args.ref_load
            self._reference = ReferenceModel(self._parameters, lambda: self._load_weights(place))
        replays = args.use_routing_replay or args.use_rollout_routing_replay
        self._replay = RoutingReplay(self._chunks) if replays else None
        self._old_actor = None
        self._teacher = None
        if self._advantage.distills and args.opd_type == "megatron":
            self._teacher = ReferenceModel(self._parameters, lambda: self._load_weights(args.opd_teacher_load))
        self._export = Exporter(
            self._parameters, self._names, weight_coordinates(), max_bytes=args.update_weight_buffer_size
        )
        start = StartState(0, self._weight_version)
        if args.resume_from:
            directory = Path(args.resume_from) / "trainer"
            trained = self._restore(directory)
            self._weight_version = trained.weight_version
            logger.info("resumed from %s: rollout %d is next", directory, trained.rollout_id + 1)
            start = StartState(trained.rollout_id + 1, trained.weight_version)
        if args.keep_old_actor:
            # The engines are given these weights before they generate anything.
            keeps = 2 if args.entry == "train_async" else 1
            self._old_actor = SyncedWeights(self._parameters, self._weight_version, keeps)
        return start

    def train(self, rollout_id: int, batch: RankBatch) -> dict[str, float]:
        """One rollout: log-probs of the reference and of the policy before training, then its optimizer steps.

        Args:
            batch: this data-parallel rank's part.

        Returns:
            Metrics of the whole batch, the same on all ranks; seconds under `perf/`.

        Raises:
            NonFiniteError: a loss or gradient norm is infinite or not a number.
        """
        begin = time.monotonic()
        return self._optimize(rollout_id, self._prepare(rollout_id, batch), begin)

    def train_with_critic(
        self, rollout_id: int, batch: RankBatch, values: np.ndarray
    ) -> tuple[dict[str, float], np.ndarray]:
        """`train` with the critic's values; in the first `--num-critic-only-steps` rollouts nothing is trained.

        Args:
            values: float32 [R], what `Critic.values` returned for this batch.

        Returns:
            The metrics, and float32 [R]: the returns that the critic is to learn.
        """
        begin = time.monotonic()
        steps = self._prepare(rollout_id, batch, values)
        returns = np.zeros_like(values)
        # Not the steps' own micro-batches: a hook may have masked more for the policy.
        trained = self._micro_batches(batch, batch.micro_batches) if parallel.is_last_stage() else []
        for each, micro_batches in zip(steps if trained else [], trained, strict=True):
            put_rows(returns, each.returns, micro_batches)
        if rollout_id < self.args.num_critic_only_steps:
            return {"perf/log_probs_time": time.monotonic() - begin}, returns
        return self._optimize(rollout_id, steps, begin), returns

    def _prepare(self, rollout_id: int, batch: RankBatch, values: np.ndarray | None = None) -> list[Step]:
        """Everything that comes before a rollout's first step."""
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

    def _optimize(self, rollout_id: int, steps: list[Step], begin: float) -> dict[str, float]:
        """The rollout's optimizer steps, and its metrics."""
        trained = time.monotonic()
        if self.args.reset_optimizer_states:
            reset_states(self._optimizer)
        metrics = train_metrics([self._train_step(rollout_id, index, each) for index, each in enumerate(steps)])
        if self._reference and self.args.ref_update_interval and (rollout_id + 1) % self.args.ref_update_interval == 0:
            self._reference.become_policy()
        metrics["perf/log_probs_time"] = trained - begin
        metrics["perf/actor_train_time"] = time.monotonic() - trained
        return metrics

    def save(self, directory: str, rollout_id: int) -> None:
        """Writes this rank's part of a checkpoint into an existing directory.

        With --async-save it returns once everything is copied, see `CheckpointWriter.save`.
        """
        args = self.args
        trained = checkpoint.Trained(rollout_id, self._weight_version)
        if self._reference and args.ref_update_interval:
            self._save_reference(Path(directory, REFERENCE_DIRECTORY), trained)
        self._write(Path(directory), trained)

    def export_hf(self, directory: str) -> None:
        """Writes the weights as a Hugging Face directory, with the config and tokenizer of `--hf-checkpoint`."""
        write_hf_directory(Path(directory), self._export(), Path(self.args.hf_checkpoint), sends=dist.get_rank() == 0)

    def update_weights(self, engines: Sequence[EngineAddress], api_key: str | None) -> dict[str, float]:
        """Sends the weights to every engine as the next version, bucket by bucket.

        Raises:
            WeightSyncError: names the engines that did not take it. They are not left paused.
        """
        begin = time.monotonic()
        version = self._weight_version + 1
        sends = dist.get_rank() == 0
        controls = [EngineControl(engine.url, api_key, UPDATE_TIMEOUT) for engine in engines]
        failure: list[str | None] = [None]
        num_bytes = 0
        # Every rank takes part in every gather, also after the sender has failed.
        buckets = make_buckets(self._export(), self.args.update_weight_buffer_size)
        if sends:
            try:
                with EngineUpdate(controls, version) as update:
                    for bucket in buckets:
                        update.send(bucket)
                    update.end(update.num_tensors)
                num_bytes = update.num_bytes
            except ColloidError as error:
                failure = [str(error)]
        for _ in buckets:
            pass
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise WeightSyncError(failure[0])
        self._weight_version = version
        if self._old_actor:
            self._old_actor.synced(version)
        return {
            "weight_version": float(version),
            "perf/update_weights_time": time.monotonic() - begin,
            "perf/update_weights_bytes": float(num_bytes),
        }

    def weight_checksums(self) -> dict[str, str]:
        """Hugging Face name -> xxh3_128 of the tensor's raw bytes, in the dtype that is sent; on rank 0."""
        return {name: checksum(tensor) for name, tensor in self._export()}

    def _updated_reference(self) -> str | None:
        """Where the checkpoint that is resumed has a reference that was updated, and is to be again."""
        if not (self.args.resume_from and self.args.ref_update_interval):
            return None
        place = Path(self.args.resume_from, "trainer", REFERENCE_DIRECTORY)
        return str(place) if place.is_dir() else None

    def _save_reference(self, directory: Path, trained: checkpoint.Trained) -> None:
        """Before the checkpoint's last file is there, so that a whole checkpoint has a whole reference."""
        if dist.get_rank() == 0:
            directory.mkdir()
        dist.barrier()
        with self._reference.swapped_in():
            checkpoint.save(self._writer, directory, trained, self._chunks, None, None, self._layout, with_rng=False)

    def _load_weights(self, place: str) -> None:
        if is_torch_dist(place):
            checkpoint.load_weights(Path(place), self._chunks)
        else:
            load_parameters(self._parameters, self._names, HFCheckpoint(place), weight_coordinates())

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

    def _train_step(self, rollout_id: int, index: int, known: Step) -> dict[str, float]:
        self._hooks.before_train_step(rollout_id, index, self._chunks, self._optimizer, self._scheduler)
        num_parts = len(known.micro_batches) * parallel.data_parallel_size()
        trainer_known = index == 0 or known.old is not None
        sums = step.forward_backward(
            self._chunks,
            self._optimizer,
            known.micro_batches,
            LogitsHead() if self._custom else self._head,
            StepLoss(self._loss, known, trainer_known, 1 / max(1, num_parts)),
            with_entropy=not self._sft,
            recompute_loss=bool(self.args.recompute_loss_function),
            routed=self._routing.training(index),
        )
        totals = step.reduce_sums(sums, self.args.device)
        metrics = {name: value / weight for name, (value, weight) in totals.items() if weight}
        self._update(metrics, "loss", rollout_id, index)
        return metrics


def engine_log_probs(micro_batch: MicroBatch) -> torch.Tensor:
    """[R], the engine's; 0 where no sample has any, as then all are masked."""
    found = micro_batch.rollout_log_probs
    return micro_batch.token_weights.new_zeros(len(micro_batch.loss_mask)) if found is None else found
