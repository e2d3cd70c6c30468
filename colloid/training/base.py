"""What every trainer rank does, whatever it trains: it joins its world, packs batches, writes and restores checkpoints,
and takes optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colloid.config.profiling import profile_options
from colloid.data.batch import RankBatch
from colloid.hooks import bind, load_hook
from colloid.training.megatron import checkpoint, parallel, step
from colloid.training.megatron.checkpoint_write import CheckpointWriter
from colloid.training.megatron.held import gradient_tensors, state_tensors
from colloid.training.megatron.optimizer import learning_rate
from colloid.training.megatron.stateless_adam import forget_moments, with_moments
from colloid.training.micro_batch import MicroBatch, filled_up, make_micro_batch
from colloid.training.offload import Held, Offload
from colloid.training.offload_store import make_store
from colloid.training.profiling import Recording


class TrainerRank:
    """One rank. A subclass builds `_chunks`, `_optimizer` and `_scheduler`.

    Args:
        init_method: rendezvous of the ranks; `file:///…` on one host.
    """

    _chunks: list[Any]
    _optimizer: Any
    _scheduler: Any
    _role = "actor"

    def __init__(self, args: Any, rank: int, world_size: int, init_method: str):
        self.args = args
        self._layout = parallel.Layout(
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            virtual_pipeline=args.virtual_pipeline_model_parallel_size,
            context=args.context_parallel_size,
            expert=args.expert_model_parallel_size,
            expert_tensor=args.expert_tensor_parallel_size,
        )
        parallel.initialize(
            rank,
            world_size,
            init_method,
            self._layout,
            seed=args.seed,
            device=args.device,
            timeout_minutes=args.distributed_timeout_minutes,
        )
        if args.custom_megatron_init_path:
            bind(load_hook(args.custom_megatron_init_path, "megatron_init"), args)()
        self._writer = CheckpointWriter()
        self._recording = Recording(profile_options(args), self._role, rank, args.device == "cuda")
        self._recording.start()
        self._memory = Offload(self._held, make_store(args.device, args.run_dir), torch.device(args.device))

    def offload(self) -> None:
        """Gives this rank's memory back to the system; what needs it takes it again, see `resume`."""
        self._memory.release()

    def resume(self) -> None:
        """Takes the memory again, with all that it held."""
        self._memory.resume()

    def finish_save(self) -> None:
        """Returns when no checkpoint is being written in the background."""
        self._writer.wait()

    def end_recording(self) -> None:
        """What is recorded of memory is written."""
        self._recording.close()

    def close(self) -> None:
        """Leaves the world of ranks, once a checkpoint that is being written is."""
        self.finish_save()
        self._memory.close()
        parallel.shutdown()

    def _held(self) -> Held:
        return Held(
            [*state_tensors(self._chunks, self._optimizer), *self._other_weights()],
            gradient_tensors(self._chunks, self._optimizer),
        )

    def _other_weights(self) -> Iterator[torch.Tensor]:
        """Of other models than the one that is trained."""
        yield from ()

    def _restore(self, directory: Path) -> checkpoint.Trained:
        """Model, optimizer, schedule and random states, as the options want them."""
        trained = checkpoint.load(
            directory,
            self._chunks,
            self._optimizer,
            self._scheduler,
            self._layout,
            with_optimizer=not self.args.no_load_optim,
            with_rng=not self.args.no_load_rng,
        )
        forget_moments(self._optimizer)
        return trained

    def _write(self, directory: Path, trained: checkpoint.Trained) -> None:
        """The counterpart of `_restore`."""
        self.resume()
        optimizer = None if self.args.no_save_optim else self._optimizer
        with with_moments(optimizer):
            checkpoint.save(
                self._writer,
                directory,
                trained,
                self._chunks,
                optimizer,
                self._scheduler,
                self._layout,
                with_rng=not self.args.no_save_rng,
                background=bool(self.args.async_save),
            )

    def _micro_batches(self, batch: RankBatch, schedule: list[list[np.ndarray]]) -> list[list[MicroBatch]]:
        """This rank's part of the micro-batches of each step."""
        config = self._chunks[0].config
        split = parallel.sequence_split(config.sequence_parallel, self.args.data_pad_size_multiplier or 1)
        # An interleaved pipeline takes them in groups.
        group = config.microbatch_group_size_per_vp_stage if len(self._chunks) > 1 else 1
        return [
            filled_up([make_micro_batch(batch.samples, rows, self.args.device, split) for rows in part], group)
            for part in schedule
        ]

    def _update(self, metrics: dict[str, float], loss: str, rollout_id: int, index: int) -> None:
        """The optimizer's step `index` of a rollout, after its backward. Adds `lr` and `grad_norm` to `metrics`.

        Args:
            loss: the metric that is the loss.

        Raises:
            NonFiniteError: it or the norm of the gradient is infinite or not a number.
        """
        if loss in metrics:
            step.check_finite("loss", metrics[loss], rollout_id, index)
        metrics["lr"] = learning_rate(self._optimizer)
        metrics["grad_norm"] = step.optimizer_step(self._optimizer, self._chunks)
        step.check_finite("gradient norm", metrics["grad_norm"], rollout_id, index)
        self._scheduler.step(1)


def train_metrics(by_step: list[dict[str, float]]) -> dict[str, float]:
    """`train/…` of a rollout: of each metric the mean over the steps that measured it (their batches are equally
    large), and each step's own where there are several.
    """
    names = dict.fromkeys(name for metrics in by_step for name in metrics)
    values = {name: [metrics[name] for metrics in by_step if name in metrics] for name in names}
    metrics = {f"train/{name}": sum(found) / len(found) for name, found in values.items()}
    if len(by_step) > 1:
        for index, of_step in enumerate(by_step):
            metrics |= {f"train/step_{index}/{name}": value for name, value in of_step.items()}
    return metrics


def take_rows(flat: np.ndarray, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """What an array over a batch's response tokens says of each micro-batch's, float32 [R]."""
    if not micro_batches:
        return []
    # Ray's arrays are read-only, and torch warns of those.
    tensor = torch.from_numpy(np.array(flat, dtype=np.float32)).to(micro_batches[0].response_index.device)
    return [tensor[batch.response_index] for batch in micro_batches]


def put_rows(flat: np.ndarray, values: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch]) -> None:
    """The reverse, in place, where a token is not masked: a sample that also fills up a step is masked there."""
    for found, batch in zip(values, micro_batches, strict=True):
        mask = batch.loss_mask
        flat[batch.response_index[mask].cpu().numpy()] = found.detach()[mask].float().cpu().numpy()
