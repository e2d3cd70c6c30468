"""What rewards say beside their mean: pass@k of each prompt, categories, and what right answers are like.

An answer is right where its reward is at least 1 (`CORRECT`). What was not graded has no vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from colloid.data.batch import RolloutBatch
from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError

CORRECT = 1.0
PERCENTILES = (25, 50, 75)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that among k of a prompt's answers, drawn without replacement, at least one is right.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on
    Code", section 2.1).

    Raises:
        ValueError: not 0 <= num_correct <= num_samples, or not 1 <= k <= num_samples.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} right answers among {num_samples}")
    if num_samples - num_correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def pass_rates(samples: Sequence[Sample], rewards: Sequence[float | None]) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, … and the number of answers a prompt: means over prompts.

    Answers belong together by their sample's `group_index`; a rollout that was split into parts is one answer, its
    last part's. Prompts with fewer than k graded answers are left out of pass@k. {} where prompts have one answer, or
    samples no group.

    Args:
        rewards: None: not graded.
    """
    answers: dict[Any, dict[Any, bool | None]] = {}
    for place, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        if sample.group_index is None:
            return {}
        answer = ("sample", place) if sample.rollout_id is None else ("rollout", sample.rollout_id)
        of_prompt = answers.setdefault(sample.group_index, {})
        of_prompt[answer] = None if reward is None else reward >= CORRECT
    graded = [[right for right in of_prompt.values() if right is not None] for of_prompt in answers.values()]
    most = max(map(len, graded), default=0)
    if most < 2:
        return {}
    found = {}
    for k in sorted({most, *(2**power for power in range(most.bit_length()))}):
        rates = [pass_at_k(len(rights), sum(rights), k) for rights in graded if len(rights) >= k]
        found[f"pass@{k}"] = float(np.mean(rates))
    return found


def category_ratios(samples: Sequence[Sample], key: str) -> dict[str, float]:
    """`error_cat/<category>`: the share of graded samples whose dict reward has this value under `key`."""
    found = Counter(str(sample.reward[key]) for sample in _with_category(samples, key))
    total = sum(found.values())
    return {f"error_cat/{category}": count / total for category, count in sorted(found.items())}


def rollout_scores(args: Any, samples: Sequence[Sample], batch: RolloutBatch) -> dict[str, float]:
    """What `--log-passrate`, `--log-reward-category` and `--log-correct-samples` add to a rollout's metrics.

    Raises:
        ConfigError: no reward has the key of `--log-reward-category`.
    """
    metrics: dict[str, float] = {}
    if args.log_passrate:
        rewards = [graded_reward(sample, args.reward_key) for sample in samples]
        metrics |= {f"passrate/{name}": rate for name, rate in pass_rates(samples, rewards).items()}
    if args.log_reward_category is not None:
        graded = [sample for sample in samples if sample.reward is not None]
        if graded and not _with_category(graded, args.log_reward_category):
            raise ConfigError(
                f"--log-reward-category {args.log_reward_category} must be a key of rewards that are dicts, and the "
                f"first reward is {graded[0].reward!r:.200}"
            )
        categories = category_ratios(samples, args.log_reward_category)
        metrics |= {f"rollout/{name}": ratio for name, ratio in categories.items()}
    if args.log_correct_samples:
        metrics |= correct_metrics(batch)
    return metrics


def correct_metrics(batch: RolloutBatch) -> dict[str, float]:
    """`rollout/correct/…`: how many answers are right, and how long the right and the wrong ones are."""
    valid = ~np.isnan(batch.raw_rewards)
    if not valid.any():
        return {}
    right = valid & (batch.raw_rewards >= CORRECT)
    metrics = {
        "rollout/correct/num_samples": float(right.sum()),
        "rollout/correct/ratio": float(right.sum() / valid.sum()),
    }
    for name, chosen in (("correct", right), ("incorrect", valid & ~right)):
        lengths = batch.response_lengths[chosen]
        if len(lengths):
            metrics[f"rollout/{name}/response_length"] = float(lengths.mean())
            for percentile in PERCENTILES:
                metrics[f"rollout/{name}/response_length/p{percentile}"] = float(np.percentile(lengths, percentile))
    return metrics


def graded_reward(sample: Sample, key: str | None) -> float | None:
    """The reward as a number; None: it was not graded."""
    return None if sample.status is Status.FAILED or sample.reward is None else sample.get_reward_value(key)


def _with_category(samples: Sequence[Sample], key: str) -> list[Sample]:
    return [one for one in samples if isinstance(one.reward, dict) and key in one.reward]
