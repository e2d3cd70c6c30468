"""What no estimator may depend on, from the samples to the gradient: packing, order, samples that take no part.

What must hold of gradient and loss, and where else it is shown (P: `tests/parallel`, U: `tests/unit`):

- every micro-batch split, packing and order: here; on ranks P `test_gradients`, `test_layouts`
- DP, CP, TP, PP, both aggregations, masked and removed samples: P `test_layouts`, `test_estimators`; of the critic
  P `test_critic_layouts`
- the mean advantage of every uneven group is 0: here
- a rollout that was split into siblings has the same loss: here; U `test_columns`
- log-ratios of ±100, masked or not: here; U `test_algorithms_objective`, `test_algorithms_corrections`
- at a temperature the ratio is 1 on every path: engine and teacher's engine P `test_training`, recomputed (old actor)
  P `test_trainer_options`, reference P `test_gradients`, teacher P `test_algorithm_options`
- the stop token is trained: U `test_rollout`; padding is not: U `test_logprob`, `test_sequence_split`
- every option changes the result: P `test_algorithm_options`; here; U `test_algorithms_corrections`
- GAE with tool tokens is GAE without them: U `test_algorithms_advantages`
- whitening on 1, 2 and 4 ranks: U `test_algorithms_advantages`, `test_step_advantages`; P `test_estimators`,
  `test_critic_layouts`
- packed attention never sees the neighbour: P `test_gradients`, whose samples are each computed alone elsewhere
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from colloid.algorithms.advantages import AdvantageInputs, compute_advantages
from colloid.algorithms.estimators import ESTIMATORS
from colloid.algorithms.objective import ObjectiveInputs, objective
from colloid.algorithms.values import value_loss
from colloid.data.sample import Sample
from colloid.rollout.batching import rollout_batch
from colloid.training.advantages import step_advantages
from colloid.training.loss_options import advantage_config, objective_config
from colloid.training.micro_batch import make_micro_batch
from tests.parallel.options_cases import make_samples
from tests.unit.test_step_advantages import plan

KL = "--use-kl-loss --kl-loss-coef 0.2"
ALGORITHMS = {
    "grpo": "",
    "grpo, each token the same": "--calculate-per-token-loss --normalize-advantages",
    "gspo": "--advantage-estimator gspo",
    "cispo": "--advantage-estimator cispo",
    "rloo": "--advantage-estimator rloo",
    "reinforce++": "--advantage-estimator reinforce_plus_plus --kl-coef 0.1 --gamma 0.9",
    "reinforce++ baseline": "--advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.1",
    "gmpo": f"--policy-loss gmpo {KL}",
    "sapo": f"--policy-loss sapo {KL} --use-unbiased-kl",
    "corrected": "--use-tis --tis-level geometric --rs-level sequence --rs-upper-bound 50 --use-opsm",
    "the engine's log-probs": "--use-rollout-logprobs --normalize-advantages --eps-clip-c 3",
}
WHITENED = ("grpo, each token the same", "reinforce++", "reinforce++ baseline", "the engine's log-probs")
HOLDS_TO_REFERENCE = ("gmpo", "sapo")


def train(name, samples, parts=None, gap=0.0, log_probs=None):
    """Loss of a step, and its gradient with respect to the log-probs of each sample: index -> [response].

    Args:
        parts: [micro-batch] -> rows of `samples`; None: all in one.
        gap: what the policy's log-probs lie above all others.
        log_probs: of a sample, as `log_probs_of` makes them.
    """
    args = plan(ALGORITHMS[name])
    batch = rollout_batch(args, samples)
    parts = [np.arange(len(samples))] if parts is None else parts
    micro_batches = [make_micro_batch(batch, np.asarray(rows)) for rows in parts]
    noise = [(log_probs or log_probs_of)(sample) for sample in samples]
    old, ref, new = (torch.cat([columns[row] for columns in noise]) for row in range(3))
    new = (new + gap).requires_grad_()
    pick = [part.response_index for part in micro_batches]
    rollout = [part.rollout_log_probs for part in micro_batches]
    config = objective_config(args)
    behaviour = rollout if config.use_rollout_logprobs else [old[rows] for rows in pick]
    advantages = step_advantages(
        advantage_config(args),
        micro_batches,
        old=behaviour,
        reference=[ref[rows] for rows in pick],
        sum_over_ranks=lambda sums: sums,
    )
    total = torch.zeros((), dtype=torch.float64)
    for row, part in enumerate(micro_batches):
        inputs = ObjectiveInputs(
            log_probs=new[pick[row]],
            advantages=advantages[row],
            sample_index=part.sample_index,
            loss_mask=part.loss_mask,
            token_weights=part.token_weights.double(),
            num_samples=part.num_samples,
            old_log_probs=old[pick[row]],
            ref_log_probs=ref[pick[row]],
            rollout_log_probs=part.rollout_log_probs,
        )
        total = total + objective(inputs, config)[0]
    (gradient,) = torch.autograd.grad(total, new)
    by_sample = gradient.split(batch.response_lengths.tolist())
    return total.item(), dict(zip((sample.index for sample in samples), by_sample, strict=True))


def log_probs_of(sample):
    """float64 [response] of the old policy, the reference and the policy; they go with the sample."""
    generator = torch.Generator().manual_seed(sample.index)
    old = -torch.rand(sample.response_length, generator=generator, dtype=torch.float64) * 3
    return [
        old + scale * torch.randn(sample.response_length, generator=generator, dtype=torch.float64)
        for scale in (0.0, 0.3, 0.3)
    ]


def assert_same(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6, abs=1e-9)
    for index in ours[1].keys() & theirs[1].keys():
        torch.testing.assert_close(ours[1][index], theirs[1][index], rtol=1e-5, atol=1e-9)


def with_engine(samples):
    """The engine's log-probs near the trainer's."""
    for sample in samples:
        old = log_probs_of(sample)[0]
        noise = torch.randn(len(old), generator=torch.Generator().manual_seed(sample.index + 99), dtype=torch.float64)
        sample.rollout_log_probs = (old + 0.2 * noise).tolist()
    return samples


def samples_of(*, removed=(), failed=(), rewards=None, groups=None):
    samples = with_engine(make_samples())
    for sample in samples:
        if rewards:
            sample.reward = rewards[sample.index]
        if groups:
            sample.group_index = groups[sample.index]
        sample.remove_sample = sample.index in removed
        if sample.index in failed:
            sample.status = Sample.Status.FAILED
    return samples


def test_every_estimator_and_loss_takes_part():
    options = " ".join(ALGORITHMS.values())
    assert all(name == "ppo" or name == "grpo" or name in options for name in ESTIMATORS)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "parts", [[[0, 1, 2], [3, 4], [5, 6, 7]], [[r] for r in range(8)], [[7, 0], [6, 1, 3], [2, 5, 4]]]
)
def test_micro_batches_and_their_order_change_nothing(name, parts):
    samples = samples_of(removed=[5])
    assert_same(train(name, samples, parts), train(name, samples))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_of_the_samples_changes_nothing(name):
    samples = samples_of(removed=[5])
    shuffled = [samples[row] for row in (6, 2, 5, 0, 7, 1, 4, 3)]
    assert_same(train(name, shuffled), train(name, samples))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_sample_that_failed_is_as_if_it_were_not_there(name):
    samples = samples_of(failed=[2])
    ours = train(name, samples)
    assert not ours[1][2].any()
    assert_same(ours, train(name, [sample for sample in samples if sample.index != 2]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_removed_sample_votes_in_its_group_and_is_not_trained(name):
    ours, without = train(name, samples_of(removed=[4])), train(name, samples_of(failed=[4]))
    assert not ours[1][4].any() and ours[1][5].abs().max() > 0
    assert ours[0] != pytest.approx(without[0], rel=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_and_groups_of_one_have_no_policy_gradient(name):
    equal = samples_of(rewards=[0.3] * 8)
    alone = samples_of(groups=list(range(8)))
    for samples in (equal, alone):
        total, gradient = train(name, samples)
        assert np.isfinite(total) and all(values.isfinite().all() for values in gradient.values())
        if name not in HOLDS_TO_REFERENCE and not name.startswith("reinforce++"):
            assert all(not values.any() for values in gradient.values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_that_is_masked_whole_is_zero(name):
    total, gradient = train(name, samples_of(removed=range(8)))
    assert total == 0 and all(not values.any() for values in gradient.values())


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_huge_ratios_are_finite(name, gap):
    total, gradient = train(name, samples_of(), gap=gap)
    assert np.isfinite(total) and all(values.isfinite().all() for values in gradient.values())


def siblings(count):
    """Two groups of two rollouts, each in `count` samples: a token is trained in one of them, and context in later
    ones."""
    samples = []
    for rollout in range(4):
        ids = range(100 * rollout, 100 * rollout + 12 + rollout)
        cuts = np.linspace(0, len(ids), count + 1).round().astype(int)
        for row, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            sample = Sample(index=10 * rollout + row, rollout_id=10 * rollout, group_index=rollout // 2, tokens=[7])
            for part, trained in ((ids[:first], False), (ids[first:end], True)):
                noise = (-1 - 0.1 * np.sin(np.array(part))).tolist() if trained else None
                sample.append_response_tokens(list(part), log_probs=noise, trained=trained)
            sample.reward, sample.status = [1.0, 0.0, 0.5, 2.0][rollout], Sample.Status.COMPLETED
            samples.append(sample)
    return samples


def log_probs_of_tokens(sample):
    """As `log_probs_of`, of each token by its id."""
    ids = torch.tensor(sample.tokens[-sample.response_length :], dtype=torch.float64)
    return [-1 + 0.2 * torch.sin(ids * frequency) for frequency in (1, 2, 3)]


OF_A_TOKEN = [name for name in ALGORITHMS if name not in ("gspo", "gmpo", "corrected", "reinforce++")]
"""Of the others a token's loss follows from all trained tokens of its sample."""


@pytest.mark.parametrize("name", OF_A_TOKEN)
def test_a_rollout_that_was_split_into_siblings_has_the_same_loss(name):
    whole = train(name, siblings(1), log_probs=log_probs_of_tokens)
    assert whole[0] != 0
    for count in (2, 3, 5):
        total, gradient = train(name, siblings(count), log_probs=log_probs_of_tokens)
        assert total == pytest.approx(whole[0], rel=1e-6)
        for rollout in range(4):  # a token's gradient is in the sample that trains it, and 0 elsewhere
            parts = [gradient[10 * rollout + row] for row in range(count)]
            added = sum(torch.nn.functional.pad(part, (0, len(parts[-1]) - len(part))) for part in parts)
            torch.testing.assert_close(added, whole[1][10 * rollout], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo", "grpo, each token the same"])
def test_the_mean_advantage_of_every_uneven_group_is_zero(name):
    args = plan(ALGORITHMS[name])
    groups = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    samples = with_engine([*make_samples(), *make_samples(1)[:3]])
    for row, sample in enumerate(samples):
        sample.index, sample.group_index, sample.reward = row, groups[row], [0.0, 1.0, 0.3][row % 3] + row
    rewards = rollout_batch(args, samples).rewards
    for group in range(3):
        own = rewards[np.array(groups) == group]
        assert own.sum() == pytest.approx(0, abs=1e-9) and np.abs(own).max() > 0.1


@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages_have_mean_zero_over_the_tokens_of_the_step(name):
    args = plan(ALGORITHMS[name])
    batch = rollout_batch(args, samples_of(removed=[5]))
    parts = [make_micro_batch(batch, np.asarray(rows)) for rows in ([0, 1, 2, 3], [4, 5, 6, 7])]
    given = [torch.zeros(len(part.loss_mask), dtype=torch.float64) for part in parts]
    found = step_advantages(advantage_config(args), parts, old=given, reference=given, sum_over_ranks=lambda sums: sums)
    kept = torch.cat([values[part.loss_mask] for values, part in zip(found, parts, strict=True)])
    assert kept.mean().item() == pytest.approx(0, abs=1e-9) and kept.std().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("change", [{"gamma": 0.5}, {"lambd": 0.5}, {"kl_coef": 0.3}], ids=str)
def test_every_option_of_gae_changes_its_advantages(change):
    values = torch.linspace(-1, 1, 12, dtype=torch.float64)
    index, mask = torch.repeat_interleave(torch.arange(3), 4), torch.ones(12, dtype=torch.bool)
    base = AdvantageInputs(torch.ones(3).double(), index, mask, values - 1, -(values**2), values=values, gamma=0.9)
    plain, changed = (compute_advantages("ppo", inputs).advantages for inputs in (base, replace(base, **change)))
    assert (plain - changed).abs().max() > 1e-3


def test_the_clip_of_values_changes_the_critics_loss():
    values = torch.linspace(-1, 1, 12, dtype=torch.float64)
    mask, weights = torch.ones(12, dtype=torch.bool), torch.full((12,), 1 / 12, dtype=torch.float64)
    loose, tight = (
        value_loss(values, values * 0.2, values * 2, clip=clip, loss_mask=mask, token_weights=weights, share=1.0)[0]
        for clip in (1.0, 0.1)
    )
    assert tight > loose
