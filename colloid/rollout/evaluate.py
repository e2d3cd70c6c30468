"""Evaluation: every set, every prompt, `--n-samples-per-eval-prompt` samples each. Takes nothing from training's data.

The seeds do not depend on when it is done, so that two evaluations differ by their weights alone.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError
from colloid.rollout.context import EvalSet, RolloutContext
from colloid.rollout.custom_generate import is_forked
from colloid.rollout.options import evaluation_sampling
from colloid.rollout.runner import check_not_all_failed, gather_or_cancel
from colloid.rollout.types import Group, RolloutFnEvalOutput


async def evaluate_sets(context: RolloutContext, rollout_id: int) -> RolloutFnEvalOutput:
    """Generates and grades all evaluation sets, one after the other."""
    data = {}
    for number, eval_set in enumerate(context.eval_sets):
        samples = await _evaluate_set(context, eval_set, seed_id=-1 - number)
        check_not_all_failed(samples, f"the evaluation set {eval_set.name!r} before rollout {rollout_id}")
        key = context.args.eval_reward_key or context.args.reward_key
        data[eval_set.name] = {
            "rewards": [_reward(sample, key) for sample in samples],
            "truncated": [s.status is Status.TRUNCATED for s in samples],
            "samples": samples,
        }
    return RolloutFnEvalOutput(data)


def evaluation_metrics(data: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`eval/<name>` (mean reward of the samples that were graded) and what goes with it."""
    metrics = {}
    for name, values in data.items():
        rewards = [float(reward) for reward in values["rewards"] if reward is not None]
        if rewards:
            metrics[f"eval/{name}"] = float(np.mean(rewards))
        metrics[f"eval/{name}/truncated_ratio"] = float(np.mean(values["truncated"]))
        samples: list[Sample] = values.get("samples") or []
        if samples:
            metrics[f"eval/{name}/response_length"] = float(np.mean([s.response_length for s in samples]))
            metrics[f"eval/{name}/num_failed_samples"] = float(sum(s.status is Status.FAILED for s in samples))
    return metrics


def check_eval_names(names: list[str]) -> None:
    """Raises `ConfigError` where two sets share a name."""
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ConfigError(f"--eval-prompt-data names the set(s) {', '.join(double)} twice; each needs its own name")


async def _evaluate_set(context: RolloutContext, eval_set: EvalSet, *, seed_id: int) -> list[Sample]:
    args = context.args
    with context.client.scope() as scope:
        key = args.eval_reward_key or args.reward_key
        sampling = evaluation_sampling(args)
        runner = context.runner(scope, sampling, seed_id, evaluation=True, reward_key=key)
        groups = _groups(eval_set, args.n_samples_per_eval_prompt)
        finished = await gather_or_cancel(*(runner.run(group) for group in groups))
    return [sample for group in finished for sample in group if not is_forked(sample)]


def _reward(sample: Sample, key: str | None) -> float | None:
    return None if sample.status is Status.FAILED or sample.reward is None else sample.get_reward_value(key)


def _groups(eval_set: EvalSet, num_samples: int) -> list[Group]:
    return [
        [
            Sample(
                group_index=number,
                index=number * num_samples + copy_number,
                prompt=copy.deepcopy(row.prompt),
                tokens=row.token_ids.tolist(),
                label=copy.deepcopy(row.label),
                metadata=copy.deepcopy(row.metadata),
            )
            for copy_number in range(num_samples)
        ]
        for number, row in enumerate(eval_set.dataset.rows)
    ]
