"""A rank of the critic: a model of the policy's family whose head yields a value for each response token.

A value belongs to the state before its token: it comes from the hidden state that predicts the token. The critic has
ranks, an optimizer and a schedule of its own. What goes to the policy's ranks and back is an array over the response
tokens of the `RankBatch` that both are given: float32 [R], 0 at tokens that are not trained.

The head starts at 0: the first advantages are then the returns, and nothing depends on a seed.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import torch

from colloid.algorithms.values import means, value_loss
from colloid.data.batch import RankBatch
from colloid.training.base import TrainerRank, put_rows, take_rows, train_metrics
from colloid.training.megatron import checkpoint, parallel, step
from colloid.training.megatron.model import build_critic, name_map, named_parameters, without_value_head
from colloid.training.megatron.optimizer import build_optimizer, build_scheduler, reset_states
from colloid.training.megatron.shards import weight_coordinates
from colloid.training.micro_batch import MicroBatch
from colloid.weights.hf_loader import HFCheckpoint, load_parameters

logger = logging.getLogger(__name__)

DIRECTORY = "critic"
"""Its part of a checkpoint."""


class Critic(TrainerRank):
    """One rank; its verbs are called on all ranks at once. No Ray in here."""

    def start(self) -> int:
        """Builds the model, and loads the start weights or the checkpoint that the run resumes from.

        Returns:
            The rollout that comes first.
        """
        args = self.args
        self._chunks = build_critic(args)
        if not args.resume_from:
            self._load_weights(args.init_checkpoint)
        self._optimizer = build_optimizer(args, self._chunks)
        self._scheduler = build_scheduler(args, self._optimizer)
        self._head = step.ValueHead()
        if not args.resume_from:
            return 0
        directory = Path(args.resume_from) / DIRECTORY
        trained = self._restore(directory)
        logger.info("resumed from %s: rollout %d is next", directory, trained.rollout_id + 1)
        return trained.rollout_id + 1

    def values(self, batch: RankBatch) -> np.ndarray:
        """float32 [R]: the values of the batch's response tokens under the current weights."""
        trained = self._micro_batches(batch, batch.micro_batches)
        passes = self._micro_batches(batch, batch.log_prob_micro_batches) or trained
        flat = np.zeros(int(batch.samples.response_offsets[-1]), dtype=np.float32)
        for micro_batches in filter(None, passes):
            put_rows(flat, step.compute_log_probs(self._chunks, micro_batches, self._head), micro_batches)
        return flat

    def train(self, rollout_id: int, batch: RankBatch, values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
        """The rollout's optimizer steps.

        Args:
            values: what `values` returned for this batch.
            returns: float32 [R], what the values are to become.

        Returns:
            Metrics of the whole batch, the same on all ranks; seconds under `perf/`.

        Raises:
            NonFiniteError: a loss or gradient norm is infinite or not a number.
        """
        begin = time.monotonic()
        if self.args.reset_optimizer_states:
            reset_states(self._optimizer)
        steps = self._micro_batches(batch, batch.micro_batches)
        by_step = [
            self._train_step(
                rollout_id, index, micro_batches, take_rows(values, micro_batches), take_rows(returns, micro_batches)
            )
            for index, micro_batches in enumerate(steps)
        ]
        return train_metrics(by_step) | {"perf/critic_train_time": time.monotonic() - begin}

    def save(self, directory: str, rollout_id: int) -> None:
        """Writes this rank's part of a checkpoint into an existing directory."""
        self._write(Path(directory), checkpoint.Trained(rollout_id, 0))

    def _load_weights(self, place: str) -> None:
        parameters, names = without_value_head(named_parameters(self._chunks)), name_map(self.args)
        load_parameters(parameters, names, HFCheckpoint(place), weight_coordinates())

    def _train_step(
        self,
        rollout_id: int,
        index: int,
        micro_batches: list[MicroBatch],
        old_values: list[torch.Tensor],
        returns: list[torch.Tensor],
    ) -> dict[str, float]:
        share = 1 / max(1, len(micro_batches) * parallel.data_parallel_size())

        def loss(row: int, micro_batch: MicroBatch, values: torch.Tensor, _: None) -> tuple[torch.Tensor, step.Sums]:
            return value_loss(
                values,
                old_values[row],
                returns[row],
                clip=self.args.value_clip,
                loss_mask=micro_batch.loss_mask,
                token_weights=micro_batch.token_weights,
                share=share,
            )

        sums = step.forward_backward(self._chunks, self._optimizer, micro_batches, self._head, loss, with_entropy=False)
        metrics = means(step.reduce_sums(sums, self.args.device))
        self._update(metrics, "value_loss", rollout_id, index)
        return {f"critic_{name}" if name in ("lr", "grad_norm") else name: value for name, value in metrics.items()}
