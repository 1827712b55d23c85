"""The critic's loss by hand, its gradient against the formula, and the explained variance."""

from __future__ import annotations

import pytest
import torch

from fovea.algorithms.value_loss import explained_variance, value_loss


def test_numbers_by_hand() -> None:
    # V .3, 1.0, 1.0, -1.0; V_old 0; clip .5; returns 1, 0, 2, -.4
    # .3: inside, .5 * .49 = .245;            1.0 to 0: plain 1, near .5 gives .25: .5
    # 1.0 to 2: plain 1, near 2.25: 1.125;    -1 to -.4: plain .36, near (-.5) .01: .18
    result = value_loss(
        torch.tensor([0.3, 1.0, 1.0, -1.0]), torch.zeros(4), torch.tensor([1.0, 0.0, 2.0, -0.4]), clip=0.5
    )
    torch.testing.assert_close(result.loss_A, torch.tensor([0.245, 0.5, 1.125, 0.18]))
    assert result.clipped_A.tolist() == [False, False, True, False]


def test_without_a_clip() -> None:
    result = value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=None)
    assert result.loss_A.tolist() == [2.0]
    assert result.clipped_A.tolist() == [False]


@pytest.mark.parametrize("clip", [0.5, None])
def test_gradient_is_that_of_the_formula(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    value_loss(values, old, returns, clip=clip).loss_A.sum().backward()
    # V - ret, but 0 where V is out of range and the clipped error the larger one
    expected = (values - returns).detach()
    if clip is not None:
        near = torch.maximum(torch.minimum(values, old + clip), old - clip).detach()
        stuck = (near != values) & ((near - returns).abs() > (values - returns).abs())
        assert stuck.any()
        expected[stuck] = 0.0
    torch.testing.assert_close(values.grad, expected)


def test_explained_variance_by_hand() -> None:
    # returns 0 1 2: variance 1; errors ret - V = 0 .5 0: mean 1/6, squares 1/36 + 1/9 + 1/36 = 1/6, variance 1/12
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(torch.tensor([0.0, 0.5, 2.0]), returns) == pytest.approx(11 / 12)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 1.0), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)  # errors 0 2 4: variance 4


def test_explained_variance_is_a_number_where_nothing_varies() -> None:
    assert explained_variance(torch.tensor([0.3, 0.7]), torch.tensor([0.1, 0.1])) == 0.0
    assert explained_variance(torch.tensor([0.3]), torch.tensor([0.1])) == 0.0
    assert explained_variance(torch.empty(0), torch.empty(0)) == 0.0
