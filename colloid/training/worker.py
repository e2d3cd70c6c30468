"""The Ray side of a trainer rank: an `Actor`, or a `Critic`, in a process of its own; of each one a device slot."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from colloid import slime_imports
from colloid.data.batch import RankBatch
from colloid.engines.control import EngineAddress
from colloid.observe.logs import setup_logging
from colloid.observe.resident import Resident, take_resident

logger = logging.getLogger(__name__)


class TrainWorker:
    """One rank. Each method is called on all ranks at once, and returns when this rank is through.

    Args:
        init_method: rendezvous of the ranks, a `file://` URL on one host, else `tcp://`.
        gpu: number of this rank's GPU on its node; None: the CPU.
    """

    def __init__(self, args: Any, rank: int, world_size: int, init_method: str, gpu: int | None = None):
        _use_gpu(gpu)
        setup_logging(args.run_dir, f"trainer.{rank}")
        if args.slime_imports:
            slime_imports.install()
        from colloid.training.actor import Actor  # imports torch and Megatron-Core: seconds, and only here

        self._args = args
        self._actor = Actor(args, rank, world_size, init_method)

    def start(self) -> Any:
        """Builds the model, and loads its weights or the checkpoint. Returns a `StartState`."""
        return self._actor.start()

    def train(self, rollout_id: int, batch: RankBatch) -> dict[str, float]:
        """Trains on this rank's part of a rollout; metrics are those of the whole batch."""
        return self._actor.train(rollout_id, batch)

    def train_with_critic(
        self, rollout_id: int, batch: RankBatch, values: np.ndarray
    ) -> tuple[dict[str, float], np.ndarray]:
        """The same with the critic's values; also returns the returns that the critic is to learn."""
        return self._actor.train_with_critic(rollout_id, batch, values)

    def save(self, directory: str, rollout_id: int) -> None:
        """Writes this rank's part of a checkpoint into an existing directory."""
        self._actor.save(directory, rollout_id)

    def finish_save(self) -> None:
        """Returns when no checkpoint is being written in the background."""
        self._actor.finish_save()

    def export_hf(self, directory: str) -> None:
        """Writes the weights as a Hugging Face directory; the ranks gather them on the first one."""
        self._actor.export_hf(directory)

    def update_weights(self, engines: list[EngineAddress], api_key: str | None) -> dict[str, float]:
        """Sends the weights to every engine, as a new version."""
        return self._actor.update_weights(engines, api_key)

    def send_weights(self, engines: list[EngineAddress], api_key: str | None) -> None:
        """Sends the weights of the current version to some engines, which lack them."""
        self._actor.send_weights(engines, api_key)

    def check_weights(self, engines: list[EngineAddress], api_key: str | None) -> int | None:
        """Compares all tensors with those of every engine."""
        return self._actor.check_weights(engines, api_key)

    def offload(self) -> None:
        """Gives this rank's memory back to the system."""
        self._actor.offload()

    def resume(self) -> None:
        """Takes it again."""
        self._actor.resume()

    def resident(self) -> Resident:
        """What this process holds, and held at most since it was asked before."""
        return take_resident()

    def end(self) -> set[str]:
        """The run ends: leaves nothing behind. Returns the options that this process has read."""
        self._actor.end_updates()
        self._actor.end_recording()
        return self._args.options_read()


class CriticWorker:
    """One rank of the critic, with the options of its role. Arguments and methods as of `TrainWorker`."""

    def __init__(self, args: Any, rank: int, world_size: int, init_method: str, gpu: int | None = None):
        _use_gpu(gpu)
        setup_logging(args.run_dir, f"critic.{rank}")
        if args.slime_imports:
            slime_imports.install()
        from colloid.training.critic import Critic

        self._args = args
        self._critic = Critic(args, rank, world_size, init_method)

    def start(self) -> int:
        """Builds the model, and loads its weights or the checkpoint. Returns the rollout that comes first."""
        return self._critic.start()

    def values(self, batch: RankBatch) -> np.ndarray:
        """float32 [R]: values of the response tokens."""
        return self._critic.values(batch)

    def train(self, rollout_id: int, batch: RankBatch, values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
        """Trains on this rank's part of a rollout; metrics are those of the whole batch."""
        return self._critic.train(rollout_id, batch, values, returns)

    def save(self, directory: str, rollout_id: int) -> None:
        """Writes this rank's part of a checkpoint into an existing directory."""
        self._critic.save(directory, rollout_id)

    def finish_save(self) -> None:
        """Returns when no checkpoint is being written in the background."""
        self._critic.finish_save()

    def offload(self) -> None:
        """Gives this rank's memory back to the system."""
        self._critic.offload()

    def resume(self) -> None:
        """Takes it again."""
        self._critic.resume()

    def resident(self) -> Resident:
        """What this process holds, and held at most since it was asked before."""
        return take_resident()

    def end(self) -> set[str]:
        """The run ends. Returns the options that this process has read."""
        self._critic.end_recording()
        return self._args.options_read()


def _use_gpu(gpu: int | None) -> None:
    """This process sees that GPU alone. CUDA reads it at its first call, which comes later."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
