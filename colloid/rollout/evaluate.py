"""Evaluation: every set, every prompt, as many samples each as the set says. Takes nothing from training's data.

The seeds do not depend on when it is done, so that two evaluations differ by their weights alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from colloid.data.groups import Group
from colloid.data.sample import Sample, Status
from colloid.errors import HookError
from colloid.rollout.context import EvalSet, RolloutContext
from colloid.rollout.custom_generate import is_forked
from colloid.rollout.grading import Grader
from colloid.rollout.options import evaluation_sampling
from colloid.rollout.runner import check_not_all_failed, gather_or_cancel
from colloid.rollout.scores import category_ratios, graded_reward, pass_rates
from colloid.rollout.types import RolloutFnEvalOutput


async def evaluate_sets(context: RolloutContext, rollout_id: int) -> RolloutFnEvalOutput:
    """Generates and grades all evaluation sets, side by side: the end of one leaves no engine idle.

    Raises:
        HookError, EngineError: all samples of a set failed.
    """
    found = await gather_or_cancel(
        *(_evaluate_set(context, one, seed_id=-1 - number) for number, one in enumerate(context.eval_sets))
    )
    data = {}
    for eval_set, samples in zip(context.eval_sets, found, strict=True):
        check_not_all_failed(samples, f"the evaluation set {eval_set.name!r} before rollout {rollout_id}")
        data[eval_set.name] = {
            "rewards": [graded_reward(sample, eval_set.config.reward_key) for sample in samples],
            "truncated": [s.status is Status.TRUNCATED for s in samples],
            "samples": samples,
        }
    return RolloutFnEvalOutput(data)


def make_graders(eval_sets: Sequence[EvalSet], options: dict[str, Any]) -> dict[str, Grader]:
    """By name of the set: the graders of sets that have a reward of their own. Equal rewards share one.

    Args:
        options: of the run's grader.
    """
    made: dict[Any, Grader] = {}
    graders = {}
    for eval_set in eval_sets:
        reward = (eval_set.config.rm_type, tuple(eval_set.config.custom_rm_path or ()))
        if not any(reward):
            continue
        if reward not in made:
            rm_type, paths = reward
            own = {"custom_path": list(paths), "custom_weights": None, "group_rm": bool(paths) and options["group_rm"]}
            made[reward] = Grader(**{**options, **own, "rm_type": rm_type or options["rm_type"]})
        graders[eval_set.name] = made[reward]
    return graders


def evaluation_output(output: Any, function: str) -> RolloutFnEvalOutput:
    """What an evaluation function returned, checked; the bare data is taken too.

    Args:
        function: names it in errors.

    Raises:
        HookError: it is something else, or has no rewards, or lists of different lengths.
    """
    if isinstance(output, dict):
        output = RolloutFnEvalOutput(output)
    if not isinstance(output, RolloutFnEvalOutput):
        raise HookError(
            f"{function} must return a RolloutFnEvalOutput where evaluation is True, and returned "
            f"{type(output).__name__}"
        )
    for name, values in output.data.items():
        if not isinstance(values, dict) or not isinstance(values.get("rewards"), list | tuple):
            raise HookError(f"{function}: the data of {name!r} must be a dict with a list `rewards`: {values!r:.200}")
        lengths = {key: len(values[key]) for key in ("rewards", "truncated", "samples") if values.get(key) is not None}
        if len(set(lengths.values())) > 1:
            raise HookError(f"{function}: the lists of {name!r} must be of one length, and are {lengths}")
        bad = [one for one in values["rewards"] if one is not None and not _is_number(one)]
        if bad:
            raise HookError(
                f"{function}: the rewards of {name!r} must be numbers (None: not graded), not {bad[0]!r:.100}"
            )
    return output


def evaluation_metrics(data: dict[str, dict[str, Any]], category: str | None = None) -> dict[str, float]:
    """`eval/<name>` (mean reward of the samples that were graded) and what goes with it, by set.

    Args:
        category: the key of `--log-reward-category`.
    """
    metrics = {}
    for name, values in data.items():
        rewards = [float(reward) for reward in values["rewards"] if reward is not None]
        if rewards:
            metrics[f"eval/{name}"] = float(np.mean(rewards))
        if values.get("truncated"):
            metrics[f"eval/{name}/truncated_ratio"] = float(np.mean(values["truncated"]))
        samples: list[Sample] = values.get("samples") or []
        if samples:
            lengths = [sample.response_length for sample in samples]
            of_samples = {
                "response_length": float(np.mean(lengths)),
                "response_length/max": float(max(lengths)),
                "num_failed_samples": float(sum(s.status is Status.FAILED for s in samples)),
                **pass_rates(samples, values["rewards"]),
                **(category_ratios(samples, category) if category is not None else {}),
            }
            metrics |= {f"eval/{name}/{key}": value for key, value in of_samples.items()}
    return metrics


def scores_text(metrics: dict[str, Any]) -> str:
    """`aime 0.250, gsm8k 0.500`: the score of each set."""
    scores = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.count("/") == 1}
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items() if f"eval/{name}" in metrics)


def file_name(name: str) -> str:
    """A set's name as a part of a file's."""
    return "".join(character if character.isalnum() or character in "-." else "_" for character in name)


async def _evaluate_set(context: RolloutContext, eval_set: EvalSet, *, seed_id: int) -> list[Sample]:
    config = eval_set.config
    with context.client.scope() as scope:
        runner = context.runner(
            *(scope, evaluation_sampling(context.args, config), seed_id),
            evaluation=True,
            reward_key=config.reward_key,
            grader=context.eval_graders.get(eval_set.name),
            custom_generate=config.custom_generate_function_path,
        )
        finished = await gather_or_cancel(*(runner.run(group) for group in _groups(eval_set)))
    return [sample for group in finished for sample in group if not is_forked(sample)]


def _groups(eval_set: EvalSet) -> list[Group]:
    num_samples = eval_set.config.n_samples_per_eval_prompt
    return [
        [
            Sample(
                group_index=number,
                index=number * num_samples + copy_number,
                prompt=copy.deepcopy(row.prompt),
                tokens=row.token_ids.tolist(),
                label=copy.deepcopy(row.label),
                metadata=copy.deepcopy(row.metadata | eval_set.metadata),
            )
            for copy_number in range(num_samples)
        ]
        for number, row in enumerate(eval_set.dataset.rows)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.bool_))
