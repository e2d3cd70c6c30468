"""The critic's loss and explained variance, against the formulas token by token."""

import math

import pytest
import torch

from colloid.algorithms.values import means, value_loss

VALUES = [0.5, 1.0, -1.0, 2.0]
OLD = [0.5, 0.0, -0.9, 5.0]
RETURNS = [1.0, 0.9, 0.0, -1.0]
MASK = [True, True, True, False]
WEIGHTS = [0.5, 0.25, 0.25, 0.0]
CLIP = 0.2


def loss_of(values=VALUES, old=OLD, returns=RETURNS, mask=MASK, weights=WEIGHTS, clip=CLIP):
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    given = (torch.tensor(each, dtype=torch.float64) for each in (old, returns))
    loss, metrics = value_loss(
        values,
        *given,
        clip=clip,
        loss_mask=torch.tensor(mask),
        token_weights=torch.tensor(weights, dtype=torch.float64),
        share=1.0,
    )
    loss.backward()
    totals = {name: (float(value), float(weight)) for name, (value, weight) in metrics.items()}
    return float(loss.detach()), values.grad.tolist(), totals


def test_loss_is_the_greater_of_both_squares():
    loss, gradient, totals = loss_of()
    # Token 1 was 0 and may move to 0.2: (0.2 - 0.9)² is greater than (1 - 0.9)².
    assert loss == pytest.approx(0.5 * 0.25 + 0.25 * 0.49 + 0.25 * 1.0)
    assert gradient == pytest.approx([0.5 * 2 * -0.5, 0.0, 0.25 * 2 * -1.0, 0.0])
    assert means(totals)["value_loss"] == pytest.approx(loss)
    assert means(totals)["value_clipfrac"] == pytest.approx(0.25)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30])
def test_masked_tokens_never_enter(bad):
    plain = loss_of()
    assert loss_of(VALUES[:3] + [bad], OLD[:3] + [bad], RETURNS[:3] + [bad]) == plain


def test_all_masked_is_a_loss_of_zero_without_an_explained_variance():
    loss, gradient, totals = loss_of(mask=[False] * 4, weights=[0.0] * 4)
    assert loss == 0 and gradient == [0.0] * 4
    assert means(totals) == {"value_loss": 0.0}


def test_explained_variance_is_of_all_parts_together():
    torch.manual_seed(0)
    returns, old = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    parts = [loss_of([0.0] * n, o.tolist(), r.tolist(), [True] * n, [0.1] * n)[2] for n, o, r in chunks(old, returns)]
    totals = {name: tuple(map(sum, zip(*(part[name] for part in parts), strict=True))) for name in parts[0]}
    expected = 1 - (returns - old).var() / returns.var()
    assert means(totals)["explained_variance"] == pytest.approx(float(expected))


def chunks(old, returns):
    return [(len(o), o, r) for o, r in zip(old.split([3, 30, 17]), returns.split([3, 30, 17]), strict=True)]


def test_values_that_are_the_returns_explain_all_and_constants_nothing():
    assert means(loss_of(old=RETURNS)[2])["explained_variance"] == pytest.approx(1.0)
    assert means(loss_of(old=[7.0] * 4)[2])["explained_variance"] == pytest.approx(0.0)
    assert "explained_variance" not in means(loss_of(returns=[1.0] * 4)[2]), "nothing varies"
