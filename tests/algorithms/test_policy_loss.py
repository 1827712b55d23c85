"""Policy losses, importance weights, KL estimates and masked pictures: by hand, at their bounds, as their authors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from math import exp
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fovea.algorithms.advantage import grpo, has_signal
from fovea.algorithms.gae import whiten
from fovea.algorithms.importance import Level, importance_weights
from fovea.algorithms.kl import KlController, k1, k2, k3, k3_plus
from fovea.algorithms.masked_pictures import masked_pictures_loss, vppo_weights
from fovea.algorithms.policy_loss import PolicyLoss, cispo_loss, clipped_loss, gspo_loss, sapo_loss
from fovea.algorithms.ratio import clamp_log, ratios
from gym_tests.tables import table
from tests.augmentations import authors_vppo, low_var_kl

Loss = Callable[[Tensor, Tensor, Tensor, Sequence[int]], PolicyLoss]


ALL: dict[str, dict[str, Any]] = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "cispo": {"clip_low": 0.2, "clip_high": 0.28},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
}
LOSSES: dict[str, Loss] = {
    "clip": lambda lp, old, advantages, _: clipped_loss(lp, old, advantages, **ALL["clip"]),
    "gspo": partial(gspo_loss, **ALL["gspo"]),
    "cispo": lambda lp, old, advantages, _: cispo_loss(lp, old, advantages, **ALL["cispo"]),
    "sapo": lambda lp, old, advantages, _: sapo_loss(lp, old, advantages, **ALL["sapo"]),
}


LOGS, RATIOS, LP = map(torch.tensor, ([0.1, 0.3, 0.6, -0.5, -0.1, -0.6], [1.5, 0.5, 1.1], [-1.0, -2.0, -3.0]))
TEMPERATURES = {"temperature_positive": 1.0, "temperature_negative": 2.0}


@table(
    ("result", "losses", "low", "high"),
    [
        # completion 0: log ratios .1 .3, mean .2, s = 1.221403 (inside); completion 1: .6, s = 1.822119, clipped at
        # 1.28; completion 2: -.5 -.1 -.6, mean -.4, s = .670320, A < 0: clipped at .8
        (
            gspo_loss(LOGS, torch.zeros(6), torch.tensor([1.0, 1, 2, -1, -1, -1]), [2, 1, 3], **ALL["gspo"]),
            *([-1.221403, -1.221403, -2.56, 0.8, 0.8, 0.8], [3, 4, 5], [2]),
        ),
        # weights: 1.5 capped at 1.28, 0.5 raised to 0.8, 1.1 as it is; L = -w A lp
        (cispo_loss(LP, LP - RATIOS.log(), torch.tensor([1, 0.5, -1]), **ALL["cispo"]), [1.28, 0.8, -3.3], [1], [0]),
        # without a lower bound
        (cispo_loss(LP[1:2], LP[1:2] - math.log(0.01), torch.ones(1), clip_low=1.0, clip_high=0.28), [0.02], [], []),
        # A = 2, r = 1.5, tau 1: sigmoid(.5) = .6224593, times 4 = 2.489837, L = -4.979675
        # A = -1, r = .5, tau 2: sigmoid(-1) = .2689414, times 4/2 = .5378828, L = .5378828
        (
            sapo_loss(RATIOS[:2].log(), torch.zeros(2), torch.tensor([2.0, -1.0]), **TEMPERATURES),
            *([-4.979675, 0.5378828], [], []),
        ),
    ],
)
def test_losses_by_hand(result: PolicyLoss, losses: list[float], low: list[int], high: list[int]) -> None:
    """And the places of the tokens that are clipped."""
    torch.testing.assert_close(result.loss_A, torch.tensor(losses), atol=1e-5, rtol=1e-4)
    assert (result.clipped_low_A.nonzero()[:, 0].tolist(), result.clipped_high_A.nonzero()[:, 0].tolist()) == (
        low,
        high,
    )


def test_the_ratio_of_gspo_is_that_of_a_completion() -> None:
    result = gspo_loss(LOGS, torch.zeros(6), torch.ones(6), [2, 1, 3], **ALL["gspo"])
    torch.testing.assert_close(result.ratio_A, torch.tensor([1.221403] * 2 + [1.822119] + [0.670320] * 3))


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_minus_the_advantage(name: str) -> None:
    lp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([0.7, -1.3, 0.2])
    LOSSES[name](lp, lp.detach(), advantages, [2, 1]).loss_A.sum().backward()
    torch.testing.assert_close(lp.grad, -advantages)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [-300.0, 300.0])
def test_nothing_overflows(name: str, log_ratio: float) -> None:
    lp = torch.tensor([log_ratio, log_ratio], requires_grad=True)
    result = LOSSES[name](lp, torch.zeros(2), torch.tensor([1.0, -1.0]), [2])
    result.loss_A.sum().backward()
    assert torch.isfinite(result.loss_A).all()
    assert torch.isfinite(lp.grad).all()


@table(
    ("ratio", "advantage", "dual_clip", "expected"),
    [
        (1.0, 2.0, 3.0, -2.0),  # on-policy: -A
        (1.1, 2.0, 3.0, -2.2),  # inside: -A r
        (1.5, 2.0, 3.0, -2.56),  # good token, ratio beyond 1.28: clipped
        (0.5, 2.0, 3.0, -1.0),  # good token that became rarer: not clipped, max(-1.0, -1.6)
        (0.5, -1.0, 3.0, 0.8),  # bad token, ratio below 0.8: clipped
        (2.0, -1.0, 3.0, 2.0),  # bad token that became likelier: not clipped
        (9.0, -1.0, 3.0, 3.0),  # and beyond the dual clip: 3 |A|
        (9.0, -1.0, None, 9.0),  # without it, no bound
        (9.0, 1.0, 3.0, -1.28),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, dual_clip: float | None, expected: float) -> None:
    given = torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage])
    result = clipped_loss(*given, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    assert float(result.loss_A) == pytest.approx(expected, rel=1e-5)


LEVELS: list[Level] = ["token", "sequence", "sequence_mask"]
LENGTHS = [2, 1, 2]
LOG_RATIOS = torch.tensor([0.2, 0.3, 1.0, -2.0, 0.5])


# sums of completions .5, 1.0, -1.5: 1.648721, 2.718282, .223130; tokens e^.2, e^.3, e^1 capped, e^-2, e^.5
@table(
    ("level", "expected"),
    [
        ("token", [1.221403, 1.349859, 2.0, 0.135335, 1.648721]),
        ("sequence", [1.648721, 1.648721, 2.0, 0.223130, 0.223130]),
        ("sequence_mask", [1.648721, 1.648721, 0.0, 0.223130, 0.223130]),
    ],
)
def test_importance_weights_by_hand(level: Level, expected: list[float]) -> None:
    old = (LOG_RATIOS - 3).requires_grad_()
    result = importance_weights(old, torch.full((5,), -3.0), LENGTHS, level=level, cap=2.0)
    torch.testing.assert_close(result.weights_A, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert not result.weights_A.requires_grad
    assert result.capped_A.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-30, 0, width=32), max_size=5), min_size=1, max_size=5))
def test_equal_logprobs_are_the_identity(level: Level, completions: list[list[float]]) -> None:
    logprobs = torch.tensor([lp for completion in completions for lp in completion])
    for cap in (1.0, 2.0):
        result = importance_weights(logprobs, logprobs.clone(), list(map(len, completions)), level=level, cap=cap)
        assert result.weights_A.tolist() == [1.0] * len(logprobs)
        assert not result.capped_A.any(), "a cap of 1 takes nothing off a weight of 1"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_importance_weights_do_not_overflow(level: Level, log_ratio: float) -> None:
    result = importance_weights(torch.full((3,), log_ratio), torch.zeros(3), [2, 1], level=level, cap=2.0)
    assert torch.isfinite(result.weights_A).all()
    assert (result.weights_A <= 2.0).all()


LARGEST = exp(20)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.2}


def test_rewards_are_equal_within_a_millionth() -> None:
    rewards = torch.tensor([[0.5, 0.5 + 5e-7], [0.5, 0.5 + 3e-6], [0.5, 0.5 + 5e-4]])
    assert has_signal(rewards).tolist() == [False, True, True]
    first, _, third = grpo(rewards).tolist()
    assert first == [0, 0]
    # deviations of 2.5e-4 by 5e-4 / sqrt(2); the least deviation of a group: 0.5e-4 / (1e-4 / sqrt(2) + 1e-6)
    assert third == pytest.approx([-0.70711, 0.70711], rel=1e-2)
    least = grpo(torch.tensor([[0.1, 0.1001]], dtype=torch.float64))
    assert least.tolist()[0] == pytest.approx([-0.69725, 0.69725], rel=1e-4)


def test_the_least_variance_of_what_is_whitened() -> None:
    """Unbiased variance 2e-8 of -1e-4 and 1e-4: 1e-4 / sqrt(2e-8 + 1e-8)."""
    x = torch.tensor([[-1e-4, 1e-4]])
    torch.testing.assert_close(whiten(x, torch.ones(1, 2)), torch.tensor([[-0.57735, 0.57735]]), atol=1e-4, rtol=0)


def test_a_log_ratio_ends_at_20_and_has_no_gradient_beyond() -> None:
    logs = torch.tensor([-25.0, -19.0, 19.0, 25.0], requires_grad=True)
    assert clamp_log(logs).tolist() == [-20, -19, 19, 20]
    assert ratios(logs).tolist() == pytest.approx([exp(-20), exp(-19), exp(19), exp(20)], rel=1e-4)
    ratios(logs).sum().backward()
    assert (logs.grad != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("log_ratio", [30.0, 70.0])
def test_the_largest_loss_of_a_bad_token(log_ratio: float) -> None:
    """Without a dual clip; gspo's is of the mean over the completion."""
    one, bad = torch.tensor([log_ratio]), torch.tensor([-1.0])
    assert float(clipped_loss(one, 0 * one, bad, dual_clip=None, **BOUNDS).loss_A) == pytest.approx(LARGEST, rel=1e-4)
    two = torch.tensor([-10.0, 2 * log_ratio + 10])
    whole = gspo_loss(two, 0 * two, bad.expand(2), [2], dual_clip=None, **BOUNDS)
    assert whole.loss_A.tolist() == whole.ratio_A.tolist() == pytest.approx([LARGEST] * 2, rel=1e-4)


def test_one_token_far_off_does_not_clamp_a_completion_that_is_near() -> None:
    """The mean is clamped, and not its parts: (50 - 47) / 2 = 1.5."""
    logs = torch.tensor([50.0, -47.0])
    ratio = gspo_loss(logs, 0 * logs, torch.ones(2), [2], dual_clip=None, **BOUNDS).ratio_A
    assert ratio.tolist() == pytest.approx([exp(1.5)] * 2, rel=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_the_largest_weight_for_the_engine(level: Level) -> None:
    weights = importance_weights(torch.tensor([60.0]), torch.zeros(1), [1], level=level, cap=1e30).weights_A
    assert weights.tolist() == pytest.approx([LARGEST], rel=1e-4)


def test_a_k3_ends_at_10() -> None:
    """e^2.5 - 3.5 = 8.68 is below, e^2.7 - 3.7 = 11.18 above it; 9.5 of -10.5 is below, 11 of -12 above."""
    other = torch.tensor([2.5, 2.7, 30.0, -10.5, -12.0, -500.0])
    assert k3(torch.zeros(6), other).tolist() == pytest.approx([exp(2.5) - 3.5, 10, 10, 9.5, 10, 10], abs=1e-3)


def test_estimates_by_hand() -> None:
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


LOGITS, Q = (torch.tensor(x, dtype=torch.float64) for x in ([0.3, -0.2, 0.5], [0.2, 0.2, 0.6]))


def kl_gradient(total: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Of a sum over all actions, in the logits of the policy."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(total(logits.log_softmax(0)), logits)[0]


def true_kl(lp: torch.Tensor) -> torch.Tensor:
    return (lp.exp() * (lp - Q.log())).sum()


def test_k2_as_a_loss_has_the_gradient_of_the_kl_on_average() -> None:
    torch.testing.assert_close(
        kl_gradient(lambda lp: (lp.detach().exp() * k2(lp, Q.log())).sum()), kl_gradient(true_kl)
    )


def test_k3_plus_is_the_kl_in_value_and_in_gradient_on_average() -> None:
    """Value of k3, gradient of k2; k3 alone has the gradient of the KL in the other direction."""
    lp = LOGITS.log_softmax(0)
    torch.testing.assert_close((lp.exp() * k3_plus(lp, Q.log())).sum(), true_kl(lp))
    of_k3_plus, of_k3 = (kl_gradient(lambda lp, k=k: (lp.detach().exp() * k(lp, Q.log())).sum()) for k in (k3_plus, k3))
    torch.testing.assert_close(of_k3_plus, kl_gradient(true_kl))
    assert not torch.allclose(of_k3, of_k3_plus, atol=1e-2)


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


@table(
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
    fixed = KlController(coef=0.05, target=None, horizon=10)
    assert fixed.after(kl, 64) == fixed, "without a target the coefficient stays"


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
    coefficients = {"coef": 0.02, "entropy_penalty": 0.05, "masked_entropy_penalty": 0.03}
    loss_A = masked_pictures_loss(found[MASK_BT], masked[MASK_BT], **coefficients)
    theirs = -0.02 * masked_mean(low_var_kl(expected, masked))
    theirs = theirs + 0.03 * -masked_mean(masked) + 0.05 * -masked_mean(expected)
    assert loss_A.mean().item() == pytest.approx(theirs.item(), rel=1e-6)
    loss_A.mean().backward()
    theirs.backward()
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
