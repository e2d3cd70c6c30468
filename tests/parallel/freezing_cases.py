"""What the ranks of `test_freezing_layouts.py` do: training with some parameters frozen, see `layouts.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parallel.cases import Ranks, weights
from tests.parallel.critic_cases import critic_of, made_up
from tests.parallel.critic_layouts import critic_weights, timeless
from tests.parallel.layouts import part
from tests.parallel.rollouts import make_rollout


def train_frozen(
    rank: int,
    world_size: int,
    init_method: str,
    model: Path,
    options: dict[str, Any],
    vocab: int,
    load: Path | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Weights before and after a rollout of two steps, its metrics, and the gradients that this rank holds; with `save`
    there is a checkpoint after it, and another rollout; with `load`, that rollout alone, from a checkpoint.
    """
    ranks = Ranks(rank, world_size, init_method)
    options = {"actor_num_gpus_per_node": world_size, "num_steps_per_rollout": 2} | options
    actor = ranks.actor(model, resume_from=load, **options)
    result: dict[str, Any] = {"before": weights(actor)}
    first = actor.state.start_rollout_id

    def train(rollout: int) -> dict[str, float]:
        return timeless(actor.train(rollout, part(make_rollout(rollout, num_steps=2, vocab=vocab), micro_batch_size=2)))

    result["metrics"] = train(first)
    result["after"] = weights(actor)
    held = [(name, getattr(parameter, "main_grad", None)) for name, parameter in actor._parameters]
    result["gradients"] = {name: grad.numpy().copy() for name, grad in held if grad is not None}
    if save is not None:
        place = save / "trainer"
        if rank == 0:
            place.mkdir(parents=True)
        torch.distributed.barrier()
        actor.save(str(place), 0)
        result["next"] = {"metrics": train(1), "after": weights(actor)}
    actor.close()
    return result


def refused(
    rank: int, world_size: int, init_method: str, model: Path, options: dict[str, Any], patterns: list[str]
) -> list[str]:
    """What is said of each pattern of `--freeze-params-name-list`."""
    from colloid.errors import ConfigError
    from colloid.training.megatron import parallel

    ranks, said = Ranks(rank, world_size, init_method), []
    for pattern in patterns:
        try:
            ranks.actor(model, freeze_params_name_list=pattern, actor_num_gpus_per_node=world_size, **options)
        except ConfigError as error:
            said.append(str(error))
        finally:
            parallel.shutdown()
    return said


def train_frozen_critic(
    rank: int, world_size: int, init_method: str, model: Path, options: dict[str, Any]
) -> dict[str, dict[str, np.ndarray]]:
    """Weights before and after a step."""
    critic = critic_of(Ranks(rank, world_size, init_method), model, actor_num_gpus_per_node=world_size, **options)
    before = critic_weights(critic)
    given = part(make_rollout(), micro_batch_size=2)
    values = made_up(given.samples, 1)
    critic.train(0, given, values, made_up(given.samples, 2))
    result = {"before": before, "after": critic_weights(critic)}
    critic.close()
    return result
