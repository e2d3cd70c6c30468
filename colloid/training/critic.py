"""A rank of the critic: a model of the policy's family whose head yields a value for each response token.

A value belongs to the state before its token: it comes from the hidden state that predicts the token. The critic has
ranks, an optimizer and a schedule of its own. What goes to the policy's ranks and back is an array over the response
tokens of the `RankBatch` that both are given: float32 [R], 0 at tokens that are not trained. Both have one layout: the
last pipeline stage, where values and losses are computed, gives and takes; on the other stages the arrays are 0.

The head starts at 0: the first advantages are then the returns, and nothing depends on a seed.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import torch

from colloid.algorithms.values import Totals, added, means, value_loss
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

    _role = "critic"

    def start(self) -> int:
        """Builds the model, and loads the start weights or the checkpoint that the run resumes from.

        Returns:
            The rollout that comes first.
        """
        args = self.args
        self._chunks = build_critic(args)
        self._parameters, self._names = named_parameters(self._chunks), name_map(args)
        parallel.mark_shards(without_value_head(self._parameters), self._names)
        if not args.resume_from:
            self._load_weights(args.init_checkpoint)
        self._optimizer = build_optimizer(args, self._chunks)
        self._scheduler = build_scheduler(args, self._optimizer)
        self._head = step.ValueHead()
        start = 0
        if args.resume_from:
            directory = Path(args.resume_from) / DIRECTORY
            start = self._restore(directory).rollout_id + 1
            logger.info("resumed from %s: rollout %d is next", directory, start)
        if args.offload_train:
            self.offload()  # The engines are next.
        return start

    def values(self, batch: RankBatch) -> np.ndarray:
        """float32 [R]: the values of the batch's response tokens under the current weights."""
        self.resume()
        passes = self._micro_batches(batch, batch.log_prob_micro_batches or batch.micro_batches)
        flat = np.zeros(int(batch.samples.response_offsets[-1]), dtype=np.float32)
        for micro_batches in filter(None, passes):
            values = step.compute_log_probs(self._chunks, micro_batches, self._head)
            if parallel.is_last_stage():
                put_rows(flat, values, micro_batches)
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
        self.resume()
        with self._recording.rollout(rollout_id):
            return self._optimize(rollout_id, batch, values, returns)

    def save(self, directory: str, rollout_id: int) -> None:
        """Writes this rank's part of a checkpoint into an existing directory."""
        self._write(Path(directory), checkpoint.Trained(rollout_id, 0))

    def _optimize(self, rollout_id: int, batch: RankBatch, values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
        begin = time.monotonic()
        if self.args.reset_optimizer_states:
            reset_states(self._optimizer)
        steps = self._micro_batches(batch, batch.micro_batches)
        by_step, totals = [], []
        for index, micro_batches in enumerate(steps):
            given = take_rows(values, micro_batches), take_rows(returns, micro_batches)
            metrics, sums = self._train_step(rollout_id, index, micro_batches, *given)
            by_step.append(metrics)
            totals.append(sums)
        # Values and returns are from before the first step: one variance of them all, not the mean of the steps'.
        explained = means(added(totals)).get("explained_variance")
        whole = {} if explained is None else {"train/explained_variance": explained}
        return train_metrics(by_step) | whole | {"perf/critic_train_time": time.monotonic() - begin}

    def _load_weights(self, place: str) -> None:
        parameters = without_value_head(self._parameters)
        load_parameters(parameters, self._names, HFCheckpoint(place), weight_coordinates())

    def _train_step(
        self,
        rollout_id: int,
        index: int,
        micro_batches: list[MicroBatch],
        old_values: list[torch.Tensor],
        returns: list[torch.Tensor],
    ) -> tuple[dict[str, float], Totals]:
        """A step's metrics, and the sums that they are made of."""
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
        totals = step.reduce_sums(sums, self.args.device)
        metrics = means(totals)
        self._update(metrics, "value_loss", rollout_id, index)
        named = {f"critic_{name}" if name in ("lr", "grad_norm") else name: each for name, each in metrics.items()}
        return named, totals
