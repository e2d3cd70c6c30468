"""PPO's advantages and returns of a step's micro-batches, token by token, however the samples are packed."""

import numpy as np
import pytest
import torch

from colloid.training.advantages import AdvantageConfig, step_advantages, step_returns
from colloid.training.base import put_rows, take_rows
from colloid.training.micro_batch import make_micro_batch
from tests.parallel.rollouts import make_rollout

BATCH = make_rollout()
SPLITS = {"one": [[0, 1, 2, 3, 4, 5, 6, 7]], "pairs": [[5, 1], [2, 3], [4, 0], [6, 7]], "mixed": [[7, 0, 2], [3], [4]]}
CONFIG = AdvantageConfig("ppo", gamma=0.9, lambd=0.8, kl_coef=0.1)


def column(seed):
    """float32 [R] for the whole batch."""
    return np.random.default_rng(seed).normal(size=len(BATCH.loss_mask)).astype(np.float32)


OLD, REF, VALUES = column(1), column(2), column(3)


def by_recursion():
    """GAE as it is written, over the unmasked tokens of each sample: advantages and returns [R]."""
    advantages, returns = np.zeros((2, len(OLD)))
    for row in range(BATCH.num_samples):
        at = np.arange(BATCH.response_offsets[row], BATCH.response_offsets[row + 1])
        at = at[BATCH.loss_mask[at] == 1]
        following, later = 0.0, 0.0
        for place, token in reversed(list(enumerate(at))):
            reward = -CONFIG.kl_coef * (float(OLD[token]) - float(REF[token]))
            reward += BATCH.rewards[row] if place == len(at) - 1 else 0.0
            later = reward + CONFIG.gamma * following - VALUES[token] + CONFIG.gamma * CONFIG.lambd * later
            advantages[token], following = later, float(VALUES[token])
            returns[token] = later + following
    return advantages, returns


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("split", list(SPLITS))
def test_advantages_and_returns_are_those_of_the_recursion(split, normalize):
    micro_batches = [make_micro_batch(BATCH, np.asarray(rows)) for rows in SPLITS[split]]
    old, ref, values = (take_rows(flat, micro_batches) for flat in (OLD, REF, VALUES))
    config = AdvantageConfig(**vars(CONFIG) | {"normalize": normalize})
    known = {"old": old, "reference": ref, "values": values}
    here = np.zeros(len(OLD), dtype=bool)
    for part in micro_batches:
        here[part.response_index.numpy()] = True
    expected, returns = (np.where(here, each, 0.0) for each in by_recursion())
    if normalize:
        mask = here & (BATCH.loss_mask == 1)
        kept = expected[mask]
        expected = np.where(mask, (expected - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0.0)
    for found, wanted in (
        (step_advantages(config, micro_batches, sum_over_ranks=lambda sums: sums, **known), expected),
        (step_returns(config, micro_batches, **known), returns),
    ):
        flat = np.zeros(len(OLD), dtype=np.float32)
        put_rows(flat, found, micro_batches)
        np.testing.assert_allclose(flat, wanted, rtol=1e-5, atol=1e-6)


def test_a_teacher_changes_advantages_but_not_returns():
    micro_batches = [make_micro_batch(BATCH, np.arange(8))]
    old, ref, values = (take_rows(flat, micro_batches) for flat in (OLD, REF, VALUES))
    known = {"old": old, "reference": ref, "values": values}
    distilling = AdvantageConfig(**vars(CONFIG) | {"distills": True, "distillation_coef": 0.5})
    plain = step_returns(CONFIG, micro_batches, **known)
    assert torch.equal(step_returns(distilling, micro_batches, **known)[0], plain[0])


def test_rows_of_masked_tokens_are_zero_whatever_stands_there():
    micro_batches = [make_micro_batch(BATCH, np.arange(8))]
    flat = np.zeros(len(OLD), dtype=np.float32)
    given = torch.where(micro_batches[0].loss_mask, 1.0, torch.nan)
    put_rows(flat, [given], micro_batches)
    assert np.array_equal(flat, BATCH.loss_mask.astype(np.float32))
