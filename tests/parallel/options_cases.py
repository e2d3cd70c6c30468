"""One rank trains the same samples under one set of options after another, from the samples on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from colloid.data.sample import Sample
from tests.parallel.cases import Ranks


def make_samples(seed: int = 0, vocab: int = 512) -> list[Sample]:
    """Two groups of four, each with tool tokens somewhere; all have the engine's log-probs."""
    random = np.random.default_rng(seed)
    samples = []
    for index, reward in enumerate([1.0, 0.0, 0.25, 0.0, 2.0, 1.0, -1.0, 0.5]):
        sample = Sample(index=index, group_index=index // 4, tokens=random.integers(0, vocab, 3 + index % 4).tolist())
        for length, trained in ((3 + index % 3, True), (3, False), (2 + index % 2, True)):
            sample.append_response_tokens(
                random.integers(0, vocab, length).tolist(),
                log_probs=(-6 + random.normal(size=length)).tolist() if trained else None,
                trained=trained,
            )
        sample.reward, sample.status = reward, Sample.Status.COMPLETED
        samples.append(sample)
    return samples


def train_with(
    rank: int, world_size: int, init_method: str, model: Path, runs: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """With each run's options, after two rollouts of two steps: weights [all, flat], the last metrics, and the Hugging
    Face names of what was trained.
    """
    from colloid.rollout.batching import rollout_batch, schedule

    ranks = Ranks(rank, world_size, init_method)
    results = {}
    for name, options in runs.items():
        base = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "micro_batch_size": 3}
        actor = ranks.actor(model, **base | {"num_steps_per_rollout": 2} | options)
        metrics: dict[str, float] = {}
        start = actor.weight_checksums()
        for rollout in range(2):
            batch = rollout_batch(actor.args, make_samples(rollout))
            metrics = actor.train(rollout, schedule(actor.args, batch)[rank])
        flat = np.concatenate([tensor.float().numpy().ravel() for _, tensor in actor._export()])
        end = actor.weight_checksums()
        results[name] = {"weights": flat, "metrics": metrics, "trained": {n for n in end if start[n] != end[n]}}
        actor.close()
    return results
