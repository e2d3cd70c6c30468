"""A trainer rank: the policy, its optimizer and its reference, as four verbs (`train`, `save`, `update_weights`,
`weight_checksums`). Each is called on all ranks at once. No Ray in here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from colloid.algorithms.objective import ObjectiveInputs, objective
from colloid.algorithms.sft import sft_objective
from colloid.config.model import is_torch_dist
from colloid.data.batch import RankBatch
from colloid.engines.control import EngineAddress, EngineControl
from colloid.errors import ColloidError, WeightSyncError
from colloid.training.advantages import step_advantages, step_returns, teacher_gaps
from colloid.training.base import TrainerRank, put_rows, take_rows, train_metrics
from colloid.training.custom import custom_correction
from colloid.training.loss_options import advantage_config, custom_tis, objective_config
from colloid.training.megatron import checkpoint, parallel, step
from colloid.training.megatron.model import build_model, name_map, named_parameters
from colloid.training.megatron.optimizer import build_optimizer, build_scheduler, reset_states
from colloid.training.megatron.shards import weight_coordinates
from colloid.training.micro_batch import MicroBatch, regroup
from colloid.training.reference import ReferenceModel
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


@dataclass(frozen=True)
class _Step:
    """A step's micro-batches, and what is known of the response tokens [R] of each before the rollout's first step.
    The lists are empty where this is not the last pipeline stage; None: not computed.
    """

    micro_batches: list[MicroBatch]
    old: list[torch.Tensor] | None
    reference: list[torch.Tensor] | None
    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]
    """Where there is a critic."""
    gaps: list[torch.Tensor]
    """To the teacher, where there is one."""


class Actor(TrainerRank):
    """One rank."""

    def __init__(self, args: Any, rank: int, world_size: int, init_method: str):
        super().__init__(args, rank, world_size, init_method)
        self._weight_version = 0
        self._sft = args.loss_type == "sft_loss"
        self._head = step.Head(1.0 if self._sft else args.rollout_temperature, args.log_probs_chunk_size)
        self._objective = objective_config(args)
        self._advantage = advantage_config(args)
        self._custom_tis = custom_tis(args)

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
        self._teacher = None
        if self._advantage.distills:
            self._teacher = ReferenceModel(self._parameters, lambda: self._load_weights(args.opd_teacher_load))
        self._export = Exporter(
            self._parameters, self._names, weight_coordinates(), max_bytes=args.update_weight_buffer_size
        )
        if not args.resume_from:
            return StartState(0, self._weight_version)
        directory = Path(args.resume_from) / "trainer"
        trained = self._restore(directory)
        self._weight_version = trained.weight_version
        logger.info("resumed from %s: rollout %d is next", directory, trained.rollout_id + 1)
        return StartState(trained.rollout_id + 1, trained.weight_version)

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
        return self._optimize(rollout_id, self._prepare(batch), begin)

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
        steps = self._prepare(batch, values)
        returns = np.zeros_like(values)
        for each in steps:
            put_rows(returns, each.returns, each.micro_batches)
        if rollout_id < self.args.num_critic_only_steps:
            return {"perf/log_probs_time": time.monotonic() - begin}, returns
        return self._optimize(rollout_id, steps, begin), returns

    def _prepare(self, batch: RankBatch, values: np.ndarray | None = None) -> list[_Step]:
        """Everything that comes before a rollout's first step."""
        steps = self._micro_batches(batch, batch.micro_batches)
        passes = self._micro_batches(batch, batch.log_prob_micro_batches) or steps
        reference = self._log_probs_of(self._reference, steps, passes)
        teacher = self._log_probs_of(self._teacher, steps, passes)
        old = [
            self._log_probs(micro_batches, passes[index]) if self._recomputes(index) else None
            for index, micro_batches in enumerate(steps)
        ]
        prepared = []
        for index, micro_batches in enumerate(steps):
            behaviour = self._behaviour(micro_batches, old[index])
            of_critic = None if values is None else take_rows(values, micro_batches)
            known = {"old": behaviour, "reference": reference[index], "values": of_critic}
            returns = step_returns(self._advantage, micro_batches, **known) if of_critic else []
            advantages = self._advantages(micro_batches, teacher=teacher[index], **known)
            gaps = teacher_gaps(micro_batches, behaviour, teacher[index])
            of_first_pass = old[index] if index else None
            prepared.append(_Step(micro_batches, of_first_pass, reference[index], advantages, returns, gaps))
        return prepared

    def _optimize(self, rollout_id: int, steps: list[_Step], begin: float) -> dict[str, float]:
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
        num_bytes, paused = 0, 0.0
        # Every rank takes part in every gather, also after the sender has failed.
        buckets = make_buckets(self._export(), self.args.update_weight_buffer_size)
        if sends:
            try:
                # A drained engine has nothing to retract.
                mode = "retract" if self.args.pause_mode == "drain" else self.args.pause_mode
                with EngineUpdate(controls, version, mode) as update:
                    for bucket in buckets:
                        update.send(bucket)
                    update.end(update.num_tensors)
                num_bytes, paused = update.num_bytes, update.seconds_paused
            except ColloidError as error:
                failure = [str(error)]
        for _ in buckets:
            pass
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise WeightSyncError(failure[0])
        self._weight_version = version
        return {
            "weight_version": float(version),
            "perf/update_weights_time": time.monotonic() - begin,
            "perf/update_weights_bytes": float(num_bytes),
            "perf/generation_pause_time": paused,
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

    def _log_probs(self, micro_batches: list[MicroBatch], passes: list[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs of each of `micro_batches`, computed in the packs `passes` of the same samples."""
        if not passes:
            return []
        return regroup(step.compute_log_probs(self._chunks, passes, self._head), passes, micro_batches)

    def _log_probs_of(
        self, model: ReferenceModel | None, steps: list[list[MicroBatch]], passes: list[list[MicroBatch]]
    ) -> list[list[torch.Tensor] | None]:
        """Log-probs of other weights than the policy's, of each step; None where there is no such model."""
        if model is None:
            return [None for _ in steps]
        with model.swapped_in():
            return [self._log_probs(micro_batches, passes[index]) for index, micro_batches in enumerate(steps)]

    def _recomputes(self, index: int) -> bool:
        """Whether a step needs the trainer's log-probs before the first step. The first one's are those of its own
        forward pass: nothing was trained in between.
        """
        if self._sft:
            return False
        if self._objective.use_rollout_logprobs:
            return index > 0 and self._objective.correction.compares_with_engine
        return index > 0 or self._advantage.needs_log_probs

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
        values: list[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Of a step's micro-batches; where the loss is computed."""
        if not parallel.is_last_stage():
            return []
        return step_advantages(
            self._advantage,
            micro_batches,
            old=old,
            reference=reference,
            teacher=teacher,
            values=values,
            sum_over_ranks=parallel.sum_over_data_parallel,
        )

    def _train_step(self, rollout_id: int, index: int, known: _Step) -> dict[str, float]:
        micro_batches, old, reference, gaps = known.micro_batches, known.old, known.reference, known.gaps
        num_parts = len(micro_batches) * parallel.data_parallel_size()

        def loss(
            row: int, micro_batch: MicroBatch, log_probs: torch.Tensor, entropy: torch.Tensor | None
        ) -> tuple[torch.Tensor, step.Sums]:
            if self._sft:
                return sft_objective(log_probs, micro_batch.loss_mask, micro_batch.token_weights, 1 / num_parts)
            inputs = ObjectiveInputs(
                log_probs=log_probs,
                advantages=known.advantages[row],
                sample_index=micro_batch.sample_index,
                loss_mask=micro_batch.loss_mask,
                token_weights=micro_batch.token_weights,
                num_samples=micro_batch.num_samples,
                old_log_probs=old[row] if old else None,
                trainer_known=index == 0 or old is not None,
                ref_log_probs=reference[row] if reference else None,
                rollout_log_probs=micro_batch.rollout_log_probs,
                entropy=entropy,
                custom_correction=custom_correction(self._custom_tis, micro_batch) if self._custom_tis else None,
                share=1 / num_parts,
            )
            value, measured = objective(inputs, self._objective)
            if gaps:
                weights = micro_batch.token_weights.to(torch.float64)
                measured["opd_kl"] = ((weights * gaps[row]).sum(), weights.sum())
            return value, measured

        sums = step.forward_backward(
            self._chunks, self._optimizer, micro_batches, self._head, loss, with_entropy=not self._sft
        )
        totals = step.reduce_sums(sums, self.args.device)
        metrics = {name: value / weight for name, (value, weight) in totals.items() if weight}
        self._update(metrics, "loss", rollout_id, index)
        return metrics


def engine_log_probs(micro_batch: MicroBatch) -> torch.Tensor:
    """[R], the engine's; 0 where no sample has any, as then all are masked."""
    found = micro_batch.rollout_log_probs
    return micro_batch.token_weights.new_zeros(len(micro_batch.loss_mask)) if found is None else found
