"""Gradients of the head that are made with its logits, against plain autograd and against a second pass over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fovea.models.head_gradients import LossGradients, add_product
from fovea.models.token_logprobs import TokenScores, token_scores
from fovea.models.torch_versions import NAMES_SHARED_KEYS
from tests.models.banned_ids import ACTIONS, BANNED, TOLERANCE, VOCABULARY, WIDTH, inputs

CHUNK = 4
OF_LOGPROBS, OF_ENTROPIES = torch.linspace(-1, 2, ACTIONS), torch.linspace(0.5, -0.7, ACTIONS)
BFLOAT16_TOLERANCE = 0.01
"""Relative norm: the product of each chunk is rounded to 8 bits, with either way to make it."""


LINEAR = LossGradients(lambda _logprobs_A, _entropies_A: (OF_LOGPROBS, OF_ENTROPIES))


def linear_loss(logprobs_A: Tensor, entropies_A: Tensor) -> Tensor:
    return (OF_LOGPROBS * logprobs_A).sum() + (OF_ENTROPIES * entropies_A).sum()


def scores_of(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    loss_gradients: LossGradients | None,
    temperature: float = 0.7,
    chunk: int = CHUNK,
) -> TokenScores:
    banned = torch.tensor(BANNED)
    return token_scores(
        hidden, head, targets, banned, temperature=temperature, chunk_tokens=chunk, loss_gradients=loss_gradients
    )


def gradients_of(
    loss_gradients: LossGradients | None, loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, TokenScores]:
    hidden, head, targets = inputs()
    hidden, head = (each.detach().to(dtype).requires_grad_() for each in (hidden, head))
    scores = scores_of(hidden, head, targets, loss_gradients)
    loss(scores.logprobs_A, scores.entropies_A).backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return hidden.grad, head.grad, scores


@pytest.mark.parametrize("chunk", [1, 4, 10])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_autograd_in_float64(temperature: float, chunk: int) -> None:
    """Of a loss that is linear in neither, over the ids that may be sampled."""

    def loss(logprobs_A: Tensor, entropies_A: Tensor) -> Tensor:
        return (OF_LOGPROBS * logprobs_A.exp()).sum() + (OF_ENTROPIES * entropies_A.square()).sum()

    hidden, head, targets = inputs()
    found = scores_of(
        hidden,
        head,
        targets,
        LossGradients(lambda lp, h: (OF_LOGPROBS * lp.exp(), 2 * OF_ENTROPIES * h)),
        temperature,
        chunk,
    )
    loss(found.logprobs_A, found.entropies_A).backward()
    doubles = [each.detach().double().requires_grad_() for each in (hidden, head)]
    allowed = torch.tensor([index for index in range(VOCABULARY) if index not in BANNED])
    logprobs_AW = (doubles[0] @ doubles[1][allowed].t() / temperature).log_softmax(-1)
    logprobs_A = logprobs_AW.gather(1, torch.searchsorted(allowed, targets)[:, None])[:, 0]
    entropies_A = -(logprobs_AW.exp() * logprobs_AW).sum(-1)
    loss(logprobs_A, entropies_A).backward()
    torch.testing.assert_close(found.logprobs_A.double(), logprobs_A, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found.entropies_A.double(), entropies_A, atol=TOLERANCE, rtol=0)
    for ours, plain in zip((hidden, head), doubles, strict=True):
        assert ours.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(ours.grad.double(), plain.grad, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, BFLOAT16_TOLERANCE)])
def test_scores_are_equal_and_gradients_close_to_those_of_two_passes(dtype: torch.dtype, tolerance: float) -> None:
    found, twin = gradients_of(LINEAR, linear_loss, dtype), gradients_of(None, linear_loss, dtype)
    for name in ("logprobs_A", "entropies_A", "banned_mass_A"):
        assert torch.equal(getattr(found[2], name), getattr(twin[2], name))
    assert not found[2].banned_mass_A.requires_grad
    for ours, plain in zip(found[:2], twin[:2], strict=True):
        assert ours.dtype == dtype
        assert float((ours - plain).float().norm() / plain.float().norm()) < tolerance


def test_a_chunk_more_costs_no_precision_in_bfloat16() -> None:
    """The head is a leaf whose gradients are summed in float32, as a policy's are (`MasterWeights`)."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(rows, WIDTH, generator=generator).bfloat16() for rows in (512, VOCABULARY))
    targets = torch.randint(4, 16, (512,), generator=generator)
    loss_gradients = torch.randn(512, generator=generator)

    def error_of(known: LossGradients | None) -> float:
        leaf = head.clone().requires_grad_()
        leaf.grad_dtype = torch.float32
        scores = scores_of(hidden, leaf, targets, known)
        (loss_gradients * scores.logprobs_A).sum().backward()
        exact = head.double().requires_grad_()
        (loss_gradients * scores_of(hidden.double(), exact, targets, None).logprobs_A).sum().backward()
        assert leaf.grad is not None
        assert exact.grad is not None
        assert leaf.grad.dtype == torch.float32
        return float((leaf.grad - exact.grad).norm() / exact.grad.norm())

    assert error_of(LossGradients(lambda *_: (loss_gradients, None))) < 1.1 * error_of(None) < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_gradient_of_the_head_has_the_precision_of_its_inputs() -> None:
    """The product of a chunk is added in float32, unlike on a CPU, where it is rounded to 8 bits before."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(rows, 256, generator=generator).bfloat16() for rows in (4096, VOCABULARY))
    of_logits = torch.randn(4096, VOCABULARY, generator=generator).bfloat16()
    total = torch.zeros_like(head, dtype=torch.float32, device="cuda")
    for first in range(0, 4096, 64):
        part = slice(first, first + 64)
        add_product(total, of_logits[part].cuda().t(), hidden[part].cuda())
    exact = of_logits.double().t() @ hidden.double()
    assert float((total.cpu() - exact).norm() / exact.norm()) < 1e-5


class Operations(TorchDispatchMode):
    """Names of the operations and the numbers that they put into 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bfloat16: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if isinstance(out, Tensor) and out.dtype == torch.bfloat16:
            self.bfloat16.add(tuple(out.shape))
        return out


@pytest.mark.skipif(not NAMES_SHARED_KEYS, reason="torch 2.11 has no shapes of this product on the meta device")
def test_on_a_gpu_products_of_chunks_are_added_by_the_product_itself() -> None:
    """By the operations of the meta device, on which no product of the head's size is made in 16 bits."""
    hidden, head, targets = (each.detach().to("meta") for each in inputs())
    hidden, head = (each.bfloat16().requires_grad_() for each in (hidden, head))
    loss_gradients = LossGradients(lambda logprobs_A, _: (torch.ones_like(logprobs_A), None))
    with Operations() as found:
        token_scores(
            hidden,
            head,
            targets,
            torch.tensor(BANNED, device="meta"),
            temperature=0.7,
            chunk_tokens=CHUNK,
            loss_gradients=loss_gradients,
        )
    assert found.names.count("aten.addmm.dtype_out") == -(-ACTIONS // CHUNK)
    assert (VOCABULARY, WIDTH) not in found.bfloat16


def test_derivatives_that_cancel_may_differ_by_rounding() -> None:
    hidden, head, targets = inputs()
    noise = 1e-9 * torch.randn(2, ACTIONS, generator=torch.Generator().manual_seed(0))
    scores = scores_of(hidden, head, targets, LossGradients(lambda *_: (noise[0], None), rounding=1e-7))
    (noise[1] * scores.logprobs_A).sum().backward()
    scores = scores_of(hidden, head, targets, LossGradients(lambda *_: (noise[0], None)))
    with pytest.raises(RuntimeError, match="the loss of a token depends on the log-probs of other tokens"):
        (noise[1] * scores.logprobs_A).sum().backward()


def test_a_loss_without_entropies_has_none_of_their_gradient() -> None:
    found = gradients_of(LossGradients(lambda *_: (OF_LOGPROBS, None)), lambda lp, _: (OF_LOGPROBS * lp).sum())
    twin = gradients_of(None, lambda lp, _: (OF_LOGPROBS * lp).sum())
    for ours, plain in zip(found[:2], twin[:2], strict=True):
        torch.testing.assert_close(ours, plain, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize(("frozen", "products"), [("none", 3), ("head", 2), ("hidden", 2)])
def test_logits_are_made_once(frozen: str, products: int) -> None:
    """And a gradient that nobody asks for is not made."""
    counted = {}
    for loss_gradients in (LINEAR, None):
        hidden, head, targets = inputs()
        hidden.requires_grad_(frozen != "hidden")
        head.requires_grad_(frozen != "head")
        with FlopCounterMode(display=False) as counter:
            scores = scores_of(hidden, head, targets, loss_gradients)
            linear_loss(scores.logprobs_A, scores.entropies_A).backward()
        counted[loss_gradients] = counter.get_total_flops() / (2 * ACTIONS * WIDTH * VOCABULARY)
    assert counted == {LINEAR: products, None: products + 1}


def test_nothing_of_the_size_of_logits_waits_for_the_backward_pass() -> None:
    saved: list[int] = []
    hidden, head, targets = inputs()
    with saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        scores_of(hidden, head, targets, LINEAR, chunk=10)
    assert max(saved) == max(ACTIONS * WIDTH, VOCABULARY * WIDTH)
    assert sum(saved) == (ACTIONS + VOCABULARY) * WIDTH + 2 * ACTIONS


def test_a_loss_of_other_slopes_is_refused() -> None:
    hidden, head, targets = inputs()
    scores = scores_of(hidden, head, targets, LINEAR)
    with pytest.raises(RuntimeError, match="the loss of a token depends on the log-probs of other tokens"):
        (linear_loss(scores.logprobs_A, scores.entropies_A) + 0.001 * scores.logprobs_A[-1]).backward()
    scores = scores_of(hidden, head, targets, LINEAR)
    with pytest.raises(AssertionError, match="gradients of 2 derivatives were made, and the loss has 1"):
        (OF_LOGPROBS * scores.logprobs_A).sum().backward()


def test_one_derivative_that_is_no_number_is_left_to_the_loss() -> None:
    bad = torch.where(torch.arange(ACTIONS) == 5, torch.nan, OF_LOGPROBS)
    hidden, head, targets = inputs()
    scores = scores_of(hidden, head, targets, LossGradients(lambda *_: (bad, None)))
    (bad * scores.logprobs_A).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isnan().any(1).tolist() == [row == 5 for row in range(ACTIONS)]


def test_one_chunk_and_passes_without_gradients_ask_for_no_slopes() -> None:
    def never(*_: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("derivatives of a pass that makes logits once anyway")

    hidden, head, targets = inputs()
    scores_of(hidden, head, targets, LossGradients(never), chunk=ACTIONS)
    with torch.no_grad():
        scores_of(hidden, head, targets, LossGradients(never))
