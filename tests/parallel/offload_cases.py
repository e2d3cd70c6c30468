"""What the ranks of `test_offload.py` do: the same training with its memory given back in between, and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from colloid.engines.checksums import tensor_checksum
from colloid.observe.resident import resident_bytes
from tests.parallel.cases import Ranks
from tests.parallel.critic_cases import made_up, old_values, set_head
from tests.parallel.rollouts import make_rollout, split

ROLLOUTS = 2


def several(rank: int, world_size: int, init_method: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By name, what `straight`, `offloaded` and `resumed` training came to."""
    ranks = Ranks(rank, world_size, init_method)
    return {name: _both(ranks, **run) for name, run in runs.items()}


def resident(rank: int, world_size: int, init_method: str, model: Path) -> dict[str, float]:
    """Bytes of this process with a model of 90 MiB: before it is built, trained, given back, and trained again."""
    from colloid.training.offload import give_back

    ranks = Ranks(rank, world_size, init_method)
    cpu = torch.device("cpu")
    give_back(cpu)
    sizes = {"before": resident_bytes()}
    actor = ranks.actor(model, use_kl_loss=True, kl_loss_coef=0.1)
    batch = split(make_rollout(), world_size, 2)[rank]
    for again in ("", " again"):
        actor.train(0, batch)
        give_back(cpu)  # what the step itself needed
        sizes["trained" + again] = resident_bytes()
        actor.offload()
        sizes["released" + again] = resident_bytes()
        largest = 0
        for _ in actor._export():
            largest = max(largest, resident_bytes())
        sizes["read" + again] = largest
    actor.close()
    return sizes


def _both(
    ranks: Ranks, model: Path, place: Path, options: dict[str, Any], *, critic: bool, resumes: bool
) -> dict[str, Any]:
    options = {"num_steps_per_rollout": 2, "lr_decay_style": "cosine", "lr_warmup_iters": 3} | options
    kind = None
    if critic:
        from colloid.training.critic import Critic as kind

        options["advantage_estimator"] = "ppo"
    results = {}
    ways = [("straight", False, 0), ("offloaded", True, 0), *([("resumed", True, 1)] if resumes else [])]
    for name, offloads, first in ways:
        resume = {"resume_from": str(place)} if first else {}
        actor = ranks.actor(model, kind=kind, **options, **resume)
        if critic and not first:
            set_head(actor)
        metrics, weights = [], []
        for rollout in range(first, ROLLOUTS):
            if offloads:
                actor.offload()
                actor.offload()  # once more changes nothing
                _overwrite(actor)
            if not critic:
                weights.append(actor.weight_checksums())
                actor.update_weights([], None)
            metrics.append(_train(actor, rollout, critic))
            if resumes and offloads and (rollout, first) == (0, 0):
                actor.offload()  # what saves takes it back itself
                directory = place / ("critic" if critic else "trainer")
                directory.mkdir(parents=True, exist_ok=True)
                actor.save(str(directory), rollout)
        if offloads:
            actor.offload()
            _overwrite(actor)
            actor.resume()
        held = actor._held()
        results[name] = {
            "metrics": metrics,
            "weights": weights,
            "state": [tensor_checksum(tensor) for tensor in held.kept],
            "draws": [float(value) for value in torch.rand(3)],
        }
        actor.close()
    return results


def _overwrite(actor: Any) -> None:
    """What is given back may hold anything."""
    held = actor._held()
    for tensor in [*held.kept, *held.zeroed]:
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)


def _train(actor: Any, rollout: int, critic: bool) -> dict[str, float]:
    from colloid.training.megatron import parallel

    batch = make_rollout(rollout, num_steps=2, vocab=actor.args.vocab_size)
    part = split(batch, parallel.data_parallel_size(), 2)[parallel.data_parallel_rank()]
    if not critic:
        return _untimed(actor.train(rollout, part))
    values = actor.values(part)
    actor.offload()
    return _untimed(actor.train(rollout, part, old_values(part.samples, values), made_up(part.samples, 2)))


def _untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}
