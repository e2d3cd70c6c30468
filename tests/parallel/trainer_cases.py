"""What the ranks of `test_trainer_options.py` do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parallel import cases
from tests.parallel.rollouts import make_rollout, split


def ranks_of_options(
    rank: int,
    world_size: int,
    init_method: str,
    steps: dict[str, dict[str, Any]],
    calls: dict[str, tuple[str, dict[str, Any]]],
) -> dict[str, Any]:
    """`step_of` of each of `steps`, and each of `calls`, a function of here or of `cases` with its arguments."""
    results: dict[str, Any] = {}
    ranks = cases.Ranks(rank, world_size, f"{init_method}_steps")
    for name, step in steps.items():
        try:
            results[name] = step_of(ranks, **step)
        except Exception as error:
            error.add_note(f"in the step {name!r}")
            raise
    for name, (function, arguments) in calls.items():
        call = globals().get(function) or getattr(cases, function)
        results[name] = call(rank, world_size, f"{init_method}_{name.replace(' ', '_')}", **arguments)
    return results


def step_of(
    ranks: cases.Ranks, model: Path, options: dict[str, Any], micro_batch_size: int = 2, per_token: bool = False
) -> dict[str, Any]:
    """Metrics of one step without an update, and this rank's gradient by Megatron name."""
    from colloid.training.megatron import parallel

    actor = ranks.actor(model, lr=0.0, clip_grad=0.0, **options)
    batch = make_rollout(per_token=per_token)
    parts = split(batch, parallel.data_parallel_size(), micro_batch_size)
    metrics = actor.train(0, parts[parallel.data_parallel_rank()])
    gradients = {name: parameter.main_grad.numpy().copy() for name, parameter in actor._parameters}
    actor.close()
    return {"metrics": metrics, "gradients": gradients}


def trained_weights(rank: int, world_size: int, init_method: str, model: Path, runs: dict[str, Any]) -> dict[str, Any]:
    """Weights by Hugging Face name after three rollouts of one step, for each run's options."""
    ranks = cases.Ranks(rank, world_size, init_method)
    results = {}
    for name, options in runs.items():
        actor = ranks.actor(model, **options)
        for rollout in range(3):
            actor.train(rollout, split(make_rollout(rollout), world_size, 2)[rank])
        results[name] = cases.weights(actor)
        actor.close()
    return results


def old_actor(rank: int, world_size: int, init_method: str, model: Path, directory: Path) -> dict[str, Any]:
    """The same samples trained three times, the weights synced before the last; log-probs as they were saved."""
    ranks = cases.Ranks(rank, world_size, init_method)
    results = {}
    for name, options in {"kept": {"keep_old_actor": True}, "plain": {}}.items():
        place = directory / name
        actor = ranks.actor(
            model,
            lr=1e-2,
            num_steps_per_rollout=2,
            save_debug_train_data=place / "{rollout_id}_{rank}.pt",
            rollout_data_postprocess_path=__file__ + ":looks",
            **options,
        )
        batch = split(make_rollout(num_steps=2), world_size, 2)[rank]
        metrics = []
        for rollout in range(3):
            if rollout == 2:
                actor.update_weights([], None)
            metrics.append(actor.train(rollout, batch))
        saved = [torch.load(place / f"{rollout}_{rank}.pt", weights_only=True) for rollout in range(3)]
        log_probs = [torch.cat(each["rollout_data"]["log_probs"]).numpy() for each in saved]
        results[name] = {"log_probs": log_probs, "metrics": metrics, "saved": saved[0]}
        actor.close()
    return results


def looks(args: Any, rollout_id: int, rollout_data: dict[str, list]) -> None:
    """Has log-probs computed of every step."""


def with_hooks(rank: int, world_size: int, init_method: str, model: Path, hooks: Path) -> dict[str, Any]:
    """One rollout of two steps with all hooks of the trainer; what they noted down, and what was trained."""
    ranks = cases.Ranks(rank, world_size, init_method)
    paths = {
        "rollout_data_postprocess_path": hooks,
        "custom_model_provider_path": hooks,
        "custom_megatron_init_path": hooks,
        "custom_megatron_before_log_prob_hook_path": hooks,
        "custom_megatron_before_train_step_hook_path": hooks,
    }
    options = {"num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}
    actor = ranks.actor(model, **options, **paths)
    before = cases.weights(actor)
    metrics = actor.train(4, split(make_rollout(num_steps=2), world_size, 2)[rank])
    after = cases.weights(actor)
    actor.close()
    return {
        "metrics": metrics,
        "untouched": {name for name in before if np.array_equal(before[name], after[name])},
        "calls": (hooks.parent / f"calls_{rank}.txt").read_text().splitlines(),
    }
