"""KL estimates by hand and against a KL summed over all actions; the controller."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.algorithms.kl import KlController, k1, k2, k3, k3_plus


def test_numbers_by_hand() -> None:
    lp, ref = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.2])
    torch.testing.assert_close(k1(lp, ref), torch.tensor([0.5, -0.8]))
    torch.testing.assert_close(k2(lp, ref), torch.tensor([0.125, 0.32]))
    # e^-.5 + .5 - 1 = .106531; e^.8 - .8 - 1 = .425541
    torch.testing.assert_close(k3(lp, ref), torch.tensor([0.106531, 0.425541]), atol=1e-6, rtol=0)


def test_k1_and_k3_are_the_kl_on_average() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    kl = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for estimate in (k1, k3):
        assert float((p * estimate(p.log(), q.log())).sum()) == pytest.approx(kl)


def test_k2_as_a_loss_has_the_gradient_of_the_kl_on_average() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    lp = logits.log_softmax(0)
    (true,) = torch.autograd.grad((lp.exp() * (lp - q.log())).sum(), logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((lp.detach().exp() * k2(lp, q.log())).sum(), logits)
    torch.testing.assert_close(sampled, true)


def test_k3_plus_is_the_kl_in_value_and_in_gradient_on_average() -> None:
    """Value of k3, gradient of k2; k3 alone has the gradient of the KL in the other direction."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    lp = logits.log_softmax(0)
    true = (lp.exp() * (lp - q.log())).sum()
    (gradient,) = torch.autograd.grad(true, logits, retain_graph=True)
    p = lp.detach().exp()
    sampled = (p * k3_plus(lp, q.log())).sum()
    torch.testing.assert_close(sampled, true)
    torch.testing.assert_close(torch.autograd.grad(sampled, logits, retain_graph=True)[0], gradient)
    (of_k3,) = torch.autograd.grad((p * k3(lp, q.log())).sum(), logits)
    assert not torch.allclose(of_k3, gradient, atol=1e-2)


def verl_kl_penalty(lp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """k3+ as verl's core_algos state it, clamps included."""
    x = (ref - lp).clamp(-20, 20)
    forward = (x.exp() - x - 1).clamp(-10, 10)
    backward = 0.5 * (lp - ref).square()
    return backward - backward.detach() + forward.detach()


def test_k3_plus_is_verls() -> None:
    """Far outside of the clamps too, where the value is bounded and the gradient is not."""
    ref = torch.linspace(-30, 30, 41) - 1
    ours, theirs = (torch.full_like(ref, -1.0, requires_grad=True) for _ in range(2))
    first, second = k3_plus(ours, ref), verl_kl_penalty(theirs, ref)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), ours)[0], torch.autograd.grad(second.sum(), theirs)[0])


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.05),  # on target
        (0.11, 0.05 * (1 + 0.1 * 64 / 1000)),  # 10% above
        (0.5, 0.05 * (1 + 0.2 * 64 / 1000)),  # far above: at most 20%
        (0.0, 0.05 * (1 - 0.2 * 64 / 1000)),
        (-0.3, 0.05 * (1 - 0.2 * 64 / 1000)),  # k1 may be below 0
    ],
)
def test_controller_by_hand(kl: float, expected: float) -> None:
    controller = KlController(coef=0.05, target=0.1, horizon=1000)
    after = controller.after(kl, 64)
    assert after.coef == pytest.approx(expected, rel=1e-9)
    assert (after.target, after.horizon, controller.coef) == (0.1, 1000, 0.05)


def test_without_a_target_the_coefficient_stays() -> None:
    controller = KlController(coef=0.05, target=None, horizon=10)
    assert controller.after(9.0, 64) == controller


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 10), max_size=50))
def test_coefficient_stays_positive(kls: list[float]) -> None:
    controller = KlController(coef=0.05, target=0.1, horizon=100)
    for kl in kls:
        controller = controller.after(kl, 99)
    assert 0 < controller.coef < math.inf


def test_what_the_controller_cannot_use_is_refused() -> None:
    controller = KlController(coef=0.05, target=0.1, horizon=100)
    with pytest.raises(ValueError, match="finite"):
        controller.after(math.nan, 10)
    with pytest.raises(ValueError, match="above 100"):
        controller.after(0.1, 500)
