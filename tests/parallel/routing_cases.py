"""What the ranks of `test_routing_replay.py` do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colloid.data.batch import RolloutBatch
from tests.parallel.cases import Ranks
from tests.parallel.family_models import LAYERS, VOCAB
from tests.parallel.layouts import copies_agree, part, whole_gradients
from tests.parallel.rollouts import make_rollout, split


def any_experts(batch: RolloutBatch, num_experts: int, num_chosen: int) -> RolloutBatch:
    """The batch with experts that no router chose, and none at each sample's last token."""
    random = np.random.default_rng(7)
    scores = random.random((len(batch.tokens), LAYERS, num_experts))
    experts = scores.argsort(-1)[..., :num_chosen].astype(np.int16)
    experts[batch.offsets[1:] - 1] = -1
    return replace(batch, routed_experts=experts)


def layouts(
    rank: int, world_size: int, init_method: str, runs: list[tuple[str, int, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Each run (name, ranks, arguments of `one_layout`) in a world of its own; smaller ones on the first ranks."""
    results = {}
    for row, (name, size, arguments) in enumerate(runs):
        if rank < size:
            try:
                results[name] = one_layout(rank, size, f"{init_method}_{row}", **arguments)
            except Exception as error:
                error.add_note(f"in the layout {name!r}")
                raise
    return results


def one_layout(
    rank: int, world_size: int, init_method: str, model: Path, options: dict[str, Any], experts: tuple[int, int] | None
) -> dict[str, Any]:
    """Metrics of a rollout of two steps, and the gradient of the second, whose log-probs are computed beforehand in
    larger packs than it trains.

    Args:
        experts: (of a layer, chosen a token) of a rollout whose experts are replayed, and nothing is learnt, so that
            results differ by rounding alone; None: there are none, and the second step's routers are others.
    """
    ranks = Ranks(rank, world_size, init_method)
    options = {"actor_num_gpus_per_node": world_size, "lr": 0.0 if experts else 1e-2} | options
    actor = ranks.actor(model, num_steps_per_rollout=2, **options)
    batch = make_rollout(num_steps=2, vocab=VOCAB)
    packs = {"max_tokens": 30, "log_probs_max_tokens": 60, "length_multiple": 4}
    metrics = actor.train(0, part(any_experts(batch, *experts) if experts else batch, **packs))
    result = {"metrics": metrics, "gradients": whole_gradients(actor), "copies agree": copies_agree(actor)}
    actor.close()
    return result


def alone(rank: int, world_size: int, init_method: str, **given: dict[str, Any]) -> dict[str, Any]:
    """`choices`, `with_engines` and `log_probs` in one process, each with its arguments."""
    functions = (choices, with_engines, log_probs)
    return {
        function.__name__: function(rank, world_size, f"{init_method}_{function.__name__}", **given[function.__name__])
        for function in functions
    }


def choices(rank: int, world_size: int, init_method: str, model: Path, runs: dict[str, dict]) -> dict[str, list]:
    """Of each run's options: the choices of every call of a router, by pass, in a rollout of two steps."""
    from colloid.training.megatron.moe import routers

    ranks = Ranks(rank, world_size, init_method)
    results = {}
    for name, options in runs.items():
        actor = ranks.actor(model, num_steps_per_rollout=2, **{"lr": 3e-2} | options)
        calls: list[tuple[int, np.ndarray]] = []
        for chunk in actor._chunks:
            for _, router in routers(chunk):
                router.register_forward_hook(partial(_keep, calls))
        batch = make_rollout(num_steps=2, vocab=VOCAB)
        np.nan_to_num(batch.rollout_log_probs, copy=False, nan=-6.0)
        actor.train(0, split(batch, 1, 2)[0])
        results[name] = calls
        actor.close()
    return results


def _keep(calls: list[tuple[int, np.ndarray]], router: torch.nn.Module, _inputs: tuple, output: tuple) -> None:
    calls.append((router.layer_number, output[1].numpy().copy()))


def with_engines(
    rank: int, world_size: int, init_method: str, models: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Metrics and gradient of a step on the samples of each engine, as the rollout makes a batch of them.

    Args:
        models: of each, `samples`, and `runs`: name -> (model, options).
    """
    from colloid.rollout.batching import rollout_batch

    ranks, results = Ranks(rank, world_size, init_method), {}
    for given in models.values():
        for name, (model, options) in given["runs"].items():
            actor = ranks.actor(model, lr=0.0, **options)
            metrics = actor.train(0, split(rollout_batch(actor.args, given["samples"]), 1, 3)[0])
            trained = [(name, parameter) for name, parameter in actor._parameters if hasattr(parameter, "main_grad")]
            gradients = {parameter: tensor.main_grad.numpy().copy() for parameter, tensor in trained}
            results[name] = {"metrics": metrics, "gradients": gradients}
            actor.close()
    return results


def log_probs(
    rank: int, world_size: int, init_method: str, model: Path, experts: tuple[int, int]
) -> tuple[RolloutBatch, torch.Tensor]:
    """A batch with any experts, and the log-probs of its response tokens with these replayed."""
    actor = Ranks(rank, world_size, init_method).actor(model, use_rollout_routing_replay=True)
    batch = any_experts(make_rollout(vocab=VOCAB), *experts)
    whole = split(batch, 1, 8)[0]
    # In the order of the batch.
    flat = torch.zeros(len(batch.loss_mask))
    steps = actor._prepare(0, replace(whole, samples=batch, micro_batches=[[np.arange(batch.num_samples)]]))
    (micro_batch,) = steps[0].micro_batches
    (found,) = actor._log_probs([micro_batch], [micro_batch], actor._routing.before(0))
    flat[micro_batch.response_index] = found
    actor.close()
    return batch, flat
