"""What hooks of the trainer leave behind is checked, and errors name them."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from colloid.algorithms.objective import ObjectiveConfig
from colloid.data.batch import StepTotals
from colloid.errors import HookError
from colloid.training.micro_batch import make_micro_batch
from colloid.training.step_loss import LossChoice, StepLoss, loss_batch
from colloid.training.steps import Step, postprocessed, rollout_data
from tests.parallel.rollouts import make_rollout

BATCH = make_rollout()
PARTS = [make_micro_batch(BATCH, np.asarray(rows)) for rows in ([0, 1, 2], [3, 4, 5, 6, 7])]
ADVANTAGES = [torch.arange(len(part.loss_mask), dtype=torch.float64) for part in PARTS]
STEP = Step(PARTS, StepTotals(8, 50), advantages=ADVANTAGES)


def custom(function, part=0):
    choice = LossChoice("custom_loss", ObjectiveConfig(), custom_loss=function)
    logits = torch.zeros(len(PARTS[part].loss_mask), 4, requires_grad=True)
    return StepLoss(choice, STEP, True, 0.5)(part, PARTS[part], logits, None)


def reduced(reducer, part=0, per_token=False):
    choice = LossChoice("policy_loss", ObjectiveConfig(), reducer=reducer, per_token=per_token)
    log_probs = torch.zeros(len(PARTS[part].loss_mask), requires_grad=True)
    return StepLoss(choice, STEP, True, 0.5)(part, PARTS[part], log_probs, None)


def test_hooks_see_whole_samples_in_the_order_of_the_steps():
    data = rollout_data([replace(STEP, micro_batches=PARTS[:1], advantages=ADVANTAGES[:1]), STEP])
    assert data["steps"] == [0] * 3 + [1] * 8
    assert {len(values) for values in data.values()} == {11}
    rows = sorted(map(tuple, (tokens.tolist() for tokens in data["tokens"][3:])))
    offsets = BATCH.offsets
    assert rows == sorted(tuple(BATCH.tokens[offsets[row] : offsets[row + 1]].tolist()) for row in range(8))
    assert "log_probs" not in data and "returns" not in data


def test_a_custom_loss_sees_packed_tokens_and_lists():
    batch = loss_batch(STEP, 1)
    assert torch.equal(torch.cat(batch["unconcat_tokens"]), batch["tokens"][0])
    assert torch.equal(torch.cat(batch["advantages"]), ADVANTAGES[1])


def test_masks_and_advantages_of_a_hook_are_taken_and_denominators_stay():
    def function(rollout_id, data):
        assert rollout_id == 3
        data["loss_masks"][0] = torch.zeros_like(data["loss_masks"][0])
        data["advantages"] = [values + 1 for values in data["advantages"]]

    (step,) = postprocessed(function, 3, [STEP])
    first, before = step.micro_batches[0], PARTS[0]
    assert not first.loss_mask[first.sample_index == 0].any() and first.loss_mask.sum() < before.loss_mask.sum()
    kept = first.loss_mask
    assert torch.equal(first.token_weights[kept], before.token_weights[kept]) and not first.token_weights[~kept].any()
    assert torch.equal(step.advantages[1], ADVANTAGES[1] + 1) and step.advantages[1].dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(loss_masks=[torch.ones_like(m) for m in data["loss_masks"]]), "unmasks tokens"),
        (lambda data: data.update(advantages=data["advantages"][:-1]), "advantages has the shape"),
    ],
)
def test_what_a_hook_leaves_has_to_fit(change, message):
    with pytest.raises(HookError, match=message):
        postprocessed(lambda _, data: change(data), 0, [STEP])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch, logits, mean: logits.sum(), "must return .loss, metrics., not Tensor"),
        (lambda batch, logits, mean: (logits, {}), "a loss of one number with gradient"),
        (lambda batch, logits, mean: (torch.zeros(()), {}), "and no gradient"),
        (lambda batch, logits, mean: (logits.sum(), {"a": logits}), "the metric a has the shape .*sum_of_sample_mean"),
        (lambda batch, logits, mean: (mean(logits), {}), "what sum_of_sample_mean is given has the shape"),
    ],
)
def test_what_a_custom_loss_returns_has_to_fit(function, message):
    with pytest.raises(HookError, match=message):
        custom(function)


def test_metrics_of_a_custom_loss_are_summed_over_micro_batches():
    def function(batch, logits, mean):
        return mean(logits[:, 0]), {"ones": mean(torch.ones(len(logits)))}

    sums = [custom(function, part)[1] for part in range(2)]
    value, weight = (sum(float(each["ones"][row]) for each in sums) for row in range(2))
    assert value / weight == pytest.approx(float(sum(part.token_weights.sum() for part in PARTS)))


@pytest.mark.parametrize(
    ("reducer", "message"),
    [
        (lambda *lengths: None, "must return a function of a tensor, not NoneType"),
        (lambda *lengths: lambda x: x, "must reduce a tensor to one number"),
    ],
)
def test_what_a_reducer_returns_has_to_fit(reducer, message):
    with pytest.raises(HookError, match=message):
        reduced(reducer)


@pytest.mark.parametrize(("per_token", "denominator"), [(False, 8), (True, 50)])
def test_a_reducer_gets_the_samples_and_is_divided_by_the_global_batch(per_token, denominator):
    seen = []

    def reducer(*given):
        seen.extend(given)
        return lambda x: (x * 0).sum() + 3.0

    loss, metrics = reduced(reducer, part=1, per_token=per_token)
    assert loss.item() == float(metrics["pg_loss"][0]) == pytest.approx(3.0 / denominator)
    part = PARTS[1]
    assert seen[:2] == [part.lengths.tolist(), part.response_lengths.tolist()] and seen[3] is per_token
    assert torch.equal(torch.cat(seen[2]).bool(), part.loss_mask)


def test_the_functions_that_the_page_shows_run():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    shown = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, shown)
    old = [torch.full_like(values, -np.log(512)) for values in ADVANTAGES]
    step, args = replace(STEP, old=old), SimpleNamespace(rollout_temperature=0.8)
    choice = LossChoice("custom_loss", ObjectiveConfig(), custom_loss=lambda *given: shown["custom_loss"](args, *given))
    logits = torch.zeros(len(PARTS[1].loss_mask), 512, requires_grad=True)
    loss, metrics = StepLoss(choice, step, True, 0.5)(1, PARTS[1], logits, None)
    loss.backward()
    part = PARTS[1]
    assert loss.item() == pytest.approx(-float((part.token_weights * ADVANTAGES[1]).sum()), rel=1e-5)
    assert float(metrics["ratio"][0]) == pytest.approx(float(part.token_weights.sum()), rel=1e-5)
    assert (logits.grad.abs().sum(1) > 0).equal(part.loss_mask & (ADVANTAGES[1] != 0))
    assert torch.isfinite(reduced(shown["reducer"])[0])
