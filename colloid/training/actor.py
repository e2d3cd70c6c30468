"""A trainer rank: the policy, its optimizer and its reference, as four verbs (`train`, `save`, `update_weights`,
`weight_checksums`). Each is called on all ranks at once. No Ray in here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from colloid.config.model import is_torch_dist
from colloid.data.batch import RankBatch
from colloid.engines.checksums import tensor_checksum
from colloid.engines.control import EngineAddress, EngineControl
from colloid.errors import ColloidError, WeightSyncError
from colloid.training.base import put_rows, train_metrics
from colloid.training.megatron import checkpoint, parallel, step
from colloid.training.megatron.logits_head import LogitsHead
from colloid.training.megatron.model import build_model, name_map, named_parameters
from colloid.training.megatron.optimizer import build_optimizer, build_scheduler, reset_states
from colloid.training.megatron.routing_replay import RolloutRouting, RoutingReplay
from colloid.training.megatron.shards import weight_coordinates
from colloid.training.policy_rank import PolicyRank
from colloid.training.reference import ReferenceModel
from colloid.training.step_loss import StepLoss
from colloid.training.steps import Step
from colloid.training.synced_weights import SyncedWeights
from colloid.training.weight_options import send_options
from colloid.weights.check import check_weights
from colloid.weights.export import Exporter
from colloid.weights.hf_directory import write_hf_directory
from colloid.weights.hf_loader import HFCheckpoint, load_parameters
from colloid.weights.senders import NamedTensors, Sent, WeightSender
from colloid.weights.transports import make_sender

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


class Actor(PolicyRank):
    """One rank."""

    _weight_version = 0
    _sender: WeightSender | None = None

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
        if self._objective.use_kl_loss or self._advantage.needs_reference:
            place = self._updated_reference() or args.ref_load
            self._reference = ReferenceModel(self._parameters, lambda: self._load_weights(place))
        if args.use_routing_replay or args.use_rollout_routing_replay:
            self._replay = RoutingReplay(self._chunks)
        if self._advantage.distills and args.opd_type == "megatron":
            self._teacher = ReferenceModel(self._parameters, lambda: self._load_weights(args.opd_teacher_load))
        self._export = Exporter(
            self._parameters,
            self._names,
            weight_coordinates(),
            max_bytes=args.update_weight_buffer_size,
            read=self._memory.read,
        )
        self._sender = make_sender(send_options(args))
        start = StartState(0, self._weight_version)
        if args.resume_from:
            directory = Path(args.resume_from) / "trainer"
            trained = self._restore(directory)
            self._weight_version = trained.weight_version
            logger.info("resumed from %s: rollout %d is next", directory, trained.rollout_id + 1)
            start = StartState(trained.rollout_id + 1, trained.weight_version)
        if args.keep_old_actor:
            # The engines are given these weights before they generate anything.
            oldest = args.max_staleness if args.entry == "train_async" else 0
            self._old_actor = SyncedWeights(self._parameters, self._weight_version, keeps=1 + oldest)
        if args.offload_train:
            self.offload()  # The engines are next.
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
        with self._recording.rollout(rollout_id):
            return self._optimize(rollout_id, self._prepared(rollout_id, batch), begin)

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
        with self._recording.rollout(rollout_id):
            steps = self._prepared(rollout_id, batch, values)
            returns = np.zeros_like(values)
            # Not the steps' own micro-batches: a hook may have masked more for the policy.
            trained = self._micro_batches(batch, batch.micro_batches) if parallel.is_last_stage() else []
            for each, micro_batches in zip(steps if trained else [], trained, strict=True):
                put_rows(returns, each.returns, micro_batches)
            if rollout_id < self.args.num_critic_only_steps:
                return {"perf/log_probs_time": time.monotonic() - begin}, returns
            return self._optimize(rollout_id, steps, begin), returns

    def _prepared(self, rollout_id: int, batch: RankBatch, values: np.ndarray | None = None) -> list[Step]:
        with self._recording.part("train_log_probs", rollout_id):
            return self._prepare(rollout_id, batch, values)

    def _optimize(self, rollout_id: int, steps: list[Step], begin: float) -> dict[str, float]:
        """The rollout's optimizer steps, and its metrics."""
        trained = time.monotonic()
        if self.args.reset_optimizer_states:
            reset_states(self._optimizer)
        with self._recording.part("train_actor", rollout_id):
            metrics = train_metrics([self._train_step(rollout_id, index, each) for index, each in enumerate(steps)])
        self._routing = RolloutRouting(None)  # A table of experts is not kept while the next rollout is made.
        if self._reference and self.args.ref_update_interval and (rollout_id + 1) % self.args.ref_update_interval == 0:
            self._reference.become_policy()
        metrics["perf/log_probs_time"] = trained - begin
        metrics["perf/actor_train_time"] = time.monotonic() - trained
        return metrics

    def save(self, directory: str, rollout_id: int) -> None:
        """Writes this rank's part of a checkpoint into an existing directory.

        With --async-save it returns once everything is copied, see `CheckpointWriter.save`.
        """
        self.resume()
        args = self.args
        trained = checkpoint.Trained(rollout_id, self._weight_version)
        if self._reference and args.ref_update_interval:
            self._save_reference(Path(directory, REFERENCE_DIRECTORY), trained)
        self._write(Path(directory), trained)

    def export_hf(self, directory: str) -> None:
        """Writes the weights as a Hugging Face directory, with the config and tokenizer of `--hf-checkpoint`."""
        write_hf_directory(Path(directory), self._export(), Path(self.args.hf_checkpoint), sends=dist.get_rank() == 0)

    def update_weights(self, engines: Sequence[EngineAddress], api_key: str | None) -> dict[str, float]:
        """Sends the weights to every engine as the next version.

        Raises:
            WeightSyncError: names the engines that did not take it. They are not left paused.
        """
        begin = time.monotonic()
        version = self._weight_version + 1
        controls = _controls(engines, api_key)
        sent = self._with_tensors(lambda tensors: self._sender.send(controls, version, tensors)) or Sent(0, 0, 0.0)
        self._weight_version = version
        if self._old_actor:
            self._memory.when_resumed(lambda: self._old_actor.synced(version))
        return {
            "weight_version": float(version),
            "perf/update_weights_time": time.monotonic() - begin,
            "perf/update_weights_bytes": float(sent.num_bytes),
            "perf/update_weights_share": sent.share,
            "perf/generation_pause_time": sent.seconds_paused,
        }

    def send_weights(self, engines: Sequence[EngineAddress], api_key: str | None) -> None:
        """Sends the weights of the current version to engines that lack them; nothing was trained since it was sent.

        Raises:
            WeightSyncError: names the engines that did not take it.
        """
        controls = _controls(engines, api_key)
        self._with_tensors(lambda tensors: self._sender.send(controls, self._weight_version, tensors))

    def check_weights(self, engines: Sequence[EngineAddress], api_key: str | None) -> int | None:
        """Compares all tensors with what every engine holds. Returns their number, on rank 0.

        Raises:
            WeightSyncError: lists missing, extra and different tensors.
        """
        controls = _controls(engines, api_key)
        what = controls, self.args.rollout_engine, self._weight_version
        return self._with_tensors(lambda tensors: check_weights(*what, tensors, self.args.update_weight_buffer_size))

    def _with_tensors(self, use: Callable[[NamedTensors], Any]) -> Any:
        """What `use` makes of all tensors, on rank 0. Every rank takes part in every gather, also after it has failed;
        then all ranks raise.
        """
        failure: list[str | None] = [None]
        result = None
        tensors = iter(self._export())
        if dist.get_rank() == 0:
            try:
                result = use(tensors)
            except ColloidError as error:
                failure = [str(error)]
        for _ in tensors:
            pass
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise WeightSyncError(failure[0])
        return result

    def end_updates(self) -> None:
        """Gives back what is held between weight updates: shared memory, a process group, files."""
        if self._sender is not None:
            self._sender.close()

    def close(self) -> None:
        """Leaves the world of ranks, once a checkpoint that is being written is."""
        self.end_updates()
        super().close()

    def weight_checksums(self) -> dict[str, str]:
        """Hugging Face name -> xxh3_128 of the tensor's raw bytes, in the dtype that is sent; on rank 0."""
        return {name: tensor_checksum(tensor) for name, tensor in self._export()}

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


def _controls(engines: Sequence[EngineAddress], api_key: str | None) -> list[EngineControl]:
    return [EngineControl(engine.url, api_key, UPDATE_TIMEOUT, engine.name) for engine in engines]
