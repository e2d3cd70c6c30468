"""What the ranks of `test_critic_layouts.py` do: critic and policy of one layout after another, see `layouts.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parallel.cases import Ranks
from tests.parallel.critic_cases import by_sample, critic_of, made_up, old_values
from tests.parallel.layouts import part, whole_gradients
from tests.parallel.rollouts import make_rollout

POLICY = {"gamma": 0.9, "lambd": 0.8, "normalize_advantages": True, "kl_coef": 0.1, "advantage_estimator": "ppo"}


def critic_and_policy(
    rank: int, world_size: int, init_method: str, model: Path, reference: Path, options: dict[str, Any], vocab: int
) -> dict[str, Any]:
    """Values, one step's metrics and gradient; then a rollout of two steps of both, each with what the other made."""
    from colloid.training.megatron import parallel

    ranks = Ranks(rank, world_size, init_method)
    options = {"actor_num_gpus_per_node": world_size} | options
    result: dict[str, Any] = {}
    critic = critic_of(ranks, model, lr=0.0, clip_grad=0.0, **options)
    given = part(make_rollout(vocab=vocab), micro_batch_size=3)
    values = critic.values(given)
    result["last stage"] = parallel.is_last_stage()
    result["values"] = by_sample(given.samples, values)
    wanted = made_up(given.samples, 2)
    result["step"] = timeless(critic.train(0, given, old_values(given.samples, values), wanted))
    result["gradients"] = critic_gradients(critic)
    given = part(make_rollout(num_steps=2, vocab=vocab), micro_batch_size=2)
    values = critic.values(given)
    critic.close()
    actor = ranks.actor(model, ref_load=reference, num_steps_per_rollout=2, **POLICY, **options)
    metrics, returns = actor.train_with_critic(0, given, values)
    result["returns"] = by_sample(given.samples, returns)
    result["policy"] = timeless(metrics)
    result["policy weights"] = {name: tensor.float().numpy().copy() for name, tensor in actor._export()}
    actor.close()
    critic = critic_of(ranks, model, num_steps_per_rollout=2, **options)
    result["critic"] = timeless(critic.train(0, given, values, returns))
    result["critic weights"] = critic_weights(critic)
    critic.close()
    return result


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def critic_gradients(critic: Any) -> dict[str, np.ndarray]:
    """The last step's, by Hugging Face name, on rank 0; the head's on the last pipeline stage."""
    found = whole_gradients(_Shared(critic))  # which also completes those of the distributed optimizer
    return found | value_head(critic, lambda parameter: parameter.main_grad)


def critic_weights(critic: Any) -> dict[str, np.ndarray]:
    """Likewise."""
    from colloid.training.megatron.shards import weight_coordinates
    from colloid.weights.export import Exporter

    shared = _Shared(critic)
    export = Exporter(shared._parameters, shared._names, weight_coordinates(), max_bytes=1 << 24)
    found = {name: tensor.float().numpy().copy() for name, tensor in export()}
    return value_head(critic, lambda parameter: parameter) | found


def value_head(critic: Any, of: Any) -> dict[str, np.ndarray]:
    """{"head": [1, H]} on the last pipeline stage."""
    held = dict(critic._parameters).get("value_head.weight")
    return {} if held is None else {"head": of(held).detach().float().numpy().copy()}


class _Shared:
    """What a critic has in common with a policy, named as a model whose projection is its embedding."""

    def __init__(self, critic: Any):
        from colloid.training.megatron.model import model_shape, without_value_head
        from colloid.weights.names import NameMap

        self._chunks = critic._chunks
        self._parameters = without_value_head(critic._parameters)
        self._names = NameMap(critic.args.model_type, replace(model_shape(critic.args), tied=True))


def checkpoint(
    rank: int,
    world_size: int,
    init_method: str,
    model: Path,
    options: dict[str, Any],
    saved: Path,
    load: Path | None = None,
) -> dict[str, Any]:
    """A critic that trains a rollout and is saved at `saved`, and its next rollout; with `load`, that rollout by one
    that was loaded.
    """
    from colloid.training.megatron import parallel

    ranks = Ranks(rank, world_size, init_method)
    options = {"actor_num_gpus_per_node": world_size} | options
    critic = critic_of(ranks, model, head=load is None, resume_from=load, **options)
    result: dict[str, Any] = {"first": critic.state}
    if load is None:
        _train(critic, 0)
        place = saved / "critic"
        if rank == 0:
            place.mkdir(parents=True)
        torch.distributed.barrier()
        critic.save(str(place), 0)
    result["last stage"] = parallel.is_last_stage()
    result |= {"values": _values(critic), "metrics": _train(critic, 1), "weights": critic_weights(critic)}
    critic.close()
    return result


def _values(critic: Any) -> dict[int, np.ndarray]:
    given = part(make_rollout(1), micro_batch_size=2)
    return by_sample(given.samples, critic.values(given))


def _train(critic: Any, rollout: int) -> dict[str, float]:
    given = part(make_rollout(rollout), micro_batch_size=2)
    values = made_up(given.samples, 1)
    return timeless(critic.train(rollout, given, values, made_up(given.samples, 2 + rollout)))
