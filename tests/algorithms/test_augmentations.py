"""PAPO's and VPPO's formulas against their authors' code, written out on padded tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fovea.algorithms.masked_pictures import masked_pictures_loss, vppo_weights
from tests.augmentations import authors_vppo, low_var_kl

MASK_BT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()


def logprobs(seed: int) -> Tensor:
    return -torch.rand(MASK_BT.shape, generator=torch.Generator().manual_seed(seed)) * 5


def masked_mean(x_BT: Tensor) -> Tensor:
    return (x_BT * MASK_BT).sum() / MASK_BT.sum()


def test_papo_is_the_authors_loss_and_gradient() -> None:
    """dp_actor.py: pg_loss - kl_prcp_loss * kl_prcp_coef + both entropy losses."""
    found, expected = (logprobs(0).requires_grad_() for _ in range(2))
    masked = logprobs(1)
    masked[0, 0], masked[2, 1] = 0.0, -40.0  # beyond the clamps of x
    loss_A = masked_pictures_loss(
        found[MASK_BT], masked[MASK_BT], coef=0.02, entropy_penalty=0.05, masked_entropy_penalty=0.03
    )
    theirs = -0.02 * masked_mean(low_var_kl(expected, masked))
    theirs = theirs + 0.03 * -masked_mean(masked) + 0.05 * -masked_mean(expected)
    assert loss_A.mean().item() == pytest.approx(theirs.item(), rel=1e-6)
    loss_A.mean().backward()
    theirs.backward()
    assert found.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize(("token_share", "min_scale"), [(0.4, 0.9), (0.2, 0.8), (1.0, 0.0)])
def test_vppo_has_the_authors_tokens_and_scales(token_share: float, min_scale: float) -> None:
    old, masked = logprobs(2), logprobs(3)
    weights = vppo_weights(low_var_kl(old, masked), MASK_BT, token_share=token_share, min_scale=min_scale)
    expected = authors_vppo(old, masked, MASK_BT, token_share, min_scale)
    torch.testing.assert_close(weights.kept_BT * weights.scales_B[:, None], expected)
    assert weights.scales_B.mean().item() == pytest.approx(1.0)


def test_completions_that_depend_alike_are_not_scaled() -> None:
    weights = vppo_weights(torch.full(MASK_BT.shape, 0.5), MASK_BT, token_share=0.4, min_scale=0.9)
    assert weights.scales_B.tolist() == [1.0, 1.0, 1.0]
    assert weights.kept_BT.sum(1).tolist() == [2, 1, 2]
