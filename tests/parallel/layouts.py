"""What the ranks of `test_layouts.py` do: the same stored rollouts under one layout after another.

Layouts of two ranks run two at a time in one spawn of four, and the one-rank reference on each; every layout is a world
of its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from colloid.config.layout import data_parallel_rank
from colloid.data.batch import RankBatch, RolloutBatch
from colloid.data.schedule import Bounds, build_rank_batches
from tests.parallel.cases import Ranks
from tests.parallel.rollouts import make_rollout

TP = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
VPP = {"num_layers_per_virtual_pipeline_stage": 1}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

BATCHES: dict[str, dict[str, Any]] = {
    "1 sample": {"micro_batch_size": 1},
    "2 samples": {"micro_batch_size": 2},
    "3 samples": {"micro_batch_size": 3},
    "dynamic": {"max_tokens": 45},
    "shuffled": {"micro_batch_size": 2, "shuffled": True},
}
"""How the samples of a step can be put into micro-batches."""


def run_layouts(
    rank: int, world_size: int, init_method: str, waves: list[list[tuple[str, int, dict[str, Any]]]]
) -> dict[str, dict[str, Any]]:
    """Runs each wave's layouts side by side.

    Args:
        waves: of (name, number of ranks, arguments); a wave's numbers of ranks add up to the world's. Among the
            arguments `case` is what the ranks do with the others; left out, it is `one_layout`.

    Returns:
        By name, what that returned on this rank.
    """
    results = {}
    for row, wave in enumerate(waves):
        first = 0
        for name, size, arguments in wave:
            if first <= rank < first + size:
                place, begin = f"{init_method}_{row}_{first}", time.monotonic()
                try:
                    given = {"case": one_layout} | arguments
                    results[name] = given.pop("case")(rank - first, size, place, **given)
                except Exception as error:
                    error.add_note(f"in the layout {name!r}")
                    raise
                print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
            first += size
    return results


def one_layout(
    rank: int,
    world_size: int,
    init_method: str,
    model: Path,
    options: dict[str, Any],
    batches: list[str],
    rollout: dict[str, Any],
    policy_losses: list[str],
) -> dict[str, Any]:
    """Metrics and gradient of one step for each of `batches`, and the weights after two steps with each policy loss.

    Args:
        rollout: of `make_rollout`.
    """
    from colloid.training.megatron import parallel

    ranks = Ranks(rank, world_size, init_method)
    result: dict[str, Any] = {"steps": {}, "trainings": {}}
    options = {"actor_num_gpus_per_node": world_size} | options
    actor = ranks.actor(model, lr=0.0, **options)
    result["data-parallel rank"] = (data_parallel_rank(actor.args, rank), parallel.data_parallel_rank())
    for name in batches:
        metrics = actor.train(0, part(make_rollout(**rollout), **BATCHES[name]))
        result["steps"][name] = {"metrics": metrics, "gradients": whole_gradients(actor)}
    actor.close()
    for name in policy_losses:
        given = {} if name == "ppo" else {"policy_loss": name}  # what is not given is ppo
        actor = ranks.actor(model, **options | {"num_steps_per_rollout": 2} | given)
        metrics = actor.train(0, part(make_rollout(num_steps=2, **rollout), micro_batch_size=2))
        weights = {key: tensor.float().numpy().copy() for key, tensor in actor._export()}
        result["trainings"][name] = {"metrics": metrics, "weights": weights, "copies agree": copies_agree(actor)}
        actor.close()
    return result


def part(batch: RolloutBatch, *, shuffled: bool = False, **bounds: Any) -> RankBatch:
    """What this data-parallel rank trains."""
    from colloid.training.megatron import parallel

    if shuffled:
        batch = batch.select(np.random.default_rng(1).permutation(batch.num_samples))
    parts = build_rank_batches(
        batch,
        data_parallel_size=parallel.data_parallel_size(),
        num_steps=int(batch.steps.max()) + 1,
        bounds=Bounds(**bounds),
        has_gradient=np.ones(batch.num_samples, dtype=bool),
    )
    return parts[parallel.data_parallel_rank()]


def whole_gradients(actor: Any) -> dict[str, np.ndarray]:
    """The last step's gradient (clipped) by Hugging Face name, on rank 0."""
    from colloid.training.megatron.shards import weight_coordinates
    from colloid.weights.export import Exporter

    for chunk in actor._chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets:
                # Each rank has summed its part only.
                group = buffer.data_parallel_group
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    named = [(name, parameter.main_grad) for name, parameter in actor._parameters]
    export = Exporter(named, actor._names, weight_coordinates(), max_bytes=1 << 24)
    return {name: tensor.numpy().copy() for name, tensor in export()}


def copies_agree(actor: Any) -> bool:
    """Whether all ranks that hold the same shard of a parameter hold the same numbers."""
    from colloid.training.megatron.shards import weight_coordinates
    from colloid.weights.names import Shard

    coordinates, mine = weight_coordinates(), {}
    for name, parameter in actor._parameters:
        replicated = actor._names[name].entry.shard is Shard.REPLICATED
        mine[actor._names[name].hf_names, 0 if replicated else coordinates.shard(name)[0]] = parameter.detach().clone()
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    return all(torch.equal(tensor, other[key]) for other in held for key, tensor in mine.items() if key in other)
