"""Log-probs of the head: banned ids have probability 0, and gradients that are made with the logits are autograd's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from fovea.config.model import Lora, Model
from fovea.errors import TrainError
from fovea.models.head_gradients import LossGradients, add_product
from fovea.models.plain import PlainVLM
from fovea.models.policy_network import PolicyNetwork
from fovea.models.sampling_distribution import banned_mass, sampling_logprobs_, sampling_weights_
from fovea.models.token_logprobs import TokenScores, token_scores
from fovea.models.torch_versions import NAMES_SHARED_KEYS
from fovea.models.trainable import choose_trainable
from fovea.models.vlm import VLM
from fovea.types import Batch
from tests.models.banned_ids import ACTIONS, BANNED, TOLERANCE, VOCABULARY, WIDTH, favour_banned_ids, inputs
from tests.policies import make_batch, make_policy
from tests.reference import (
    gradients,
    largest_relative_difference,
    of_row,
    reference_entropy,
    reference_logprobs,
    row_of,
)
from tests.tiny_models import FAMILIES, mixed_prompts, random_completions, tiny, with_values

UNEQUAL = ((5, 1, 7), (3, 9), (4,))


def scores_with(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int) -> TokenScores:
    return token_scores(hidden, head, targets, torch.tensor(BANNED), temperature=temperature, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([[0.7], [1.0], [2.0]])])
def test_log_probs_are_those_of_transformers_processors(temperature: float | Tensor) -> None:
    logits = 4 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    rows = temperature.flatten().tolist() if isinstance(temperature, Tensor) else [temperature] * 3
    sampled = sampling_logprobs_(logits.clone(), temperature, torch.tensor(BANNED))
    for row, given, found in zip(rows, logits, sampled, strict=True):
        processors = LogitsProcessorList([SuppressTokensLogitsProcessor(BANNED)])
        if row != 1:
            processors.insert(0, TemperatureLogitsWarper(row))
        torch.testing.assert_close(found, processors(None, given[None])[0].log_softmax(-1))
        assert found[list(BANNED)].eq(-torch.inf).all()


@pytest.mark.parametrize("temperature", [1.0, torch.tensor([[0.7], [1.0], [2.0]])])
def test_weights_are_those_of_the_log_probs(temperature: float | Tensor) -> None:
    """Of logits up to 1e4, whose exponentials have no float32, with a token of logit -inf that is not banned."""
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [20], [1e4]])
    logits[:, 7] = -torch.inf
    banned_K = torch.tensor(BANNED)
    expected = sampling_logprobs_(logits.clone(), temperature, banned_K)
    found = sampling_weights_(logits.clone(), temperature, banned_K)
    torch.testing.assert_close(found.weights_BW / found.total_B1, expected.exp())
    for token in (1, BANNED[0], 7):
        torch.testing.assert_close(found.logprobs(torch.tensor([token] * 3)), expected[:, token])


@pytest.mark.parametrize("chunk_tokens", [1000, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_a_vocabulary_without_the_banned_ids(temperature: float, chunk_tokens: int) -> None:
    """And gradients."""
    hidden, head, targets = inputs()
    found = scores_with(hidden, head, targets, temperature, chunk_tokens)
    (found.logprobs_A.sum() + 0.3 * found.entropies_A.sum()).backward()
    ours = hidden.grad, head.grad
    hidden, head, targets = inputs()
    allowed = torch.tensor([index for index in range(VOCABULARY) if index not in BANNED])
    distribution = torch.distributions.Categorical(logits=hidden @ head[allowed].t() / temperature)
    logprobs = distribution.log_prob(torch.searchsorted(allowed, targets))
    (logprobs.sum() + 0.3 * distribution.entropy().sum()).backward()
    torch.testing.assert_close(found.logprobs_A, logprobs, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found.entropies_A, distribution.entropy(), atol=TOLERANCE, rtol=0)
    for our, their in zip(ours, (hidden.grad, head.grad), strict=True):
        torch.testing.assert_close(our, their, atol=TOLERANCE, rtol=1e-4)
    assert not ours[1][list(BANNED)].any(), "no gradient reaches a banned id"


def test_the_banned_mass_is_that_of_the_whole_vocabularys_softmax() -> None:
    hidden, head, targets = inputs()
    expected = (hidden @ head.t() / 0.7).softmax(-1)[:, list(BANNED)].sum(-1)
    found = scores_with(hidden, head, targets, 0.7, 4).banned_mass_A
    assert expected.max() > 0.9, "the head favours banned ids"
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    assert not banned_mass(torch.zeros(2, 0), torch.zeros(2)).any(), "nothing is banned"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", [VLM, PlainVLM])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_favour_banned_ids_equal_transformers_with_its_mask(
    family: str, kind: type[PolicyNetwork], lora: bool
) -> None:
    parts = tiny(family)
    favour_banned_ids(parts)
    if lora:
        choose_trainable(parts.network, Model(path="x", lora=Lora(rank=4)), seed=0)
    prompts, completions = mixed_prompts(parts), random_completions(UNEQUAL)
    logprobs = of_row(reference_logprobs, parts, prompts, completions, 0.7)
    entropies = of_row(reference_entropy, parts, prompts, completions, 0.7)
    (logprobs.sum() + entropies.sum()).backward()
    expected = gradients(parts.network)
    found = kind(parts.network, parts.processor.banned_ids)(row_of(parts), temperature=0.7, chunk_tokens=10)
    (found.logprobs_A.sum() + found.entropies_A.sum()).backward()
    assert found.banned_mass_A.mean() > 0.5
    torch.testing.assert_close(found.logprobs_A, logprobs, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found.entropies_A, entropies, atol=TOLERANCE, rtol=0)
    assert largest_relative_difference(expected, gradients(parts.network)) < TOLERANCE


def test_values_do_not_depend_on_what_is_banned() -> None:
    values = []
    for banned in ((), (1, 2, 3)):
        parts = tiny("qwen3_vl")
        vlm = with_values(lambda network, _, banned=banned, **head: VLM(network, banned, **head), parts)
        values.append(vlm(row_of(parts), temperature=1.0, chunk_tokens=1000).values_A)
    assert torch.equal(*values)


def with_banned_token(batch: Batch, banned: int, *, masked: bool) -> Batch:
    """A batch whose second sample of the first group has a banned token in its middle."""
    first, second, *rest = batch.groups[0].samples
    token_ids_T, mask_T = np.concatenate([second.token_ids_T] * 3), np.ones(3 * len(second.token_ids_T), dtype=np.bool_)
    token_ids_T[1], mask_T[1] = banned, not masked
    zeros_T = np.zeros(len(mask_T), dtype=np.float32)
    given = {"token_ids_T": token_ids_T, "mask_T": mask_T, "rollout_logprobs_T": zeros_T, "advantages_T": zeros_T + 1}
    changed = replace(second, **given)
    group = replace(batch.groups[0], samples=(first, changed, *rest), task_id="row 7")
    return replace(batch, groups=(group, *batch.groups[1:]))


def test_a_banned_action_is_refused_by_name_and_a_banned_token_of_an_observation_is_not() -> None:
    parts = tiny("qwen3_vl")
    policy, banned = make_policy(parts, lr_warmup_steps=0), parts.processor.banned_ids[1]
    with pytest.raises(TrainError, match=rf"row 7 .*\b{banned}\b"):
        policy.update(with_banned_token(make_batch(parts), banned, masked=False))
    observed = with_banned_token(make_batch(parts), banned, masked=True)
    assert all(np.isfinite(logprobs_T).all() for logprobs_T in policy.logprobs(observed))
    metrics = policy.update(observed)
    assert metrics["updates_skipped"] == 0
    assert 0 < metrics["banned_mass"] < 0.1


OF_LOGPROBS, OF_ENTROPIES = torch.linspace(-1, 2, ACTIONS), torch.linspace(0.5, -0.7, ACTIONS)
BFLOAT16_TOLERANCE = 0.01
"""Relative norm: the product of each chunk is rounded to 8 bits, with either way to make it."""


LINEAR = LossGradients(lambda _logprobs_A, _entropies_A: (OF_LOGPROBS, OF_ENTROPIES))


def linear_loss(logprobs_A: Tensor, entropies_A: Tensor) -> Tensor:
    return (OF_LOGPROBS * logprobs_A).sum() + (OF_ENTROPIES * entropies_A).sum()


def scores_of(
    hidden: Tensor, head: Tensor, targets: Tensor, known: LossGradients | None, temperature: float = 0.7, chunk: int = 4
) -> TokenScores:
    more = {"temperature": temperature, "chunk_tokens": chunk, "loss_gradients": known}
    return token_scores(hidden, head, targets, torch.tensor(BANNED, device=hidden.device), **more)


def gradients_of(
    loss_gradients: LossGradients | None, loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, TokenScores]:
    hidden, head, targets = inputs()
    hidden, head = (each.detach().to(dtype).requires_grad_() for each in (hidden, head))
    scores = scores_of(hidden, head, targets, loss_gradients)
    loss(scores.logprobs_A, scores.entropies_A).backward()
    return hidden.grad, head.grad, scores


@pytest.mark.parametrize("chunk", [1, 4, 10])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_autograd_in_float64(temperature: float, chunk: int) -> None:
    """Of a loss that is linear in neither, over the ids that may be sampled."""

    def loss(logprobs_A: Tensor, entropies_A: Tensor) -> Tensor:
        return (OF_LOGPROBS * logprobs_A.exp()).sum() + (OF_ENTROPIES * entropies_A.square()).sum()

    hidden, head, targets = inputs()
    known = LossGradients(lambda lp, h: (OF_LOGPROBS * lp.exp(), 2 * OF_ENTROPIES * h))
    found = scores_of(hidden, head, targets, known, temperature, chunk)
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
        torch.testing.assert_close(ours.grad.double(), plain.grad, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, BFLOAT16_TOLERANCE)])
def test_scores_are_equal_and_gradients_close_to_those_of_two_passes(dtype: torch.dtype, tolerance: float) -> None:
    found, twin = gradients_of(LINEAR, linear_loss, dtype), gradients_of(None, linear_loss, dtype)
    for name in ("logprobs_A", "entropies_A", "banned_mass_A"):
        assert torch.equal(getattr(found[2], name), getattr(twin[2], name))
    assert not found[2].banned_mass_A.requires_grad
    assert found[2].logprobs_A.dtype == found[2].entropies_A.dtype == torch.float32
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
        scores_of(hidden, head, targets, loss_gradients)
    assert found.names.count("aten.addmm.dtype_out") == -(-ACTIONS // 4)
    assert (VOCABULARY, WIDTH) not in found.bfloat16


def test_derivatives_that_cancel_may_differ_by_rounding() -> None:
    hidden, head, targets = inputs()
    noise = 1e-9 * torch.randn(2, ACTIONS, generator=torch.Generator().manual_seed(0))
    scores = scores_of(hidden, head, targets, LossGradients(lambda *_: (noise[0], None), rounding=1e-7))
    (noise[1] * scores.logprobs_A).sum().backward()
    scores = scores_of(hidden, head, targets, LossGradients(lambda *_: (noise[0], None)))
    with pytest.raises(RuntimeError, match="the loss of a token depends on the log-probs of other tokens"):
        (noise[1] * scores.logprobs_A).sum().backward()


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
    with pytest.raises(AssertionError, match="gradients were computed for 2 derivatives, the loss has 1"):
        (OF_LOGPROBS * scores.logprobs_A).sum().backward()


def test_one_derivative_that_is_no_number_is_left_to_the_loss() -> None:
    bad = torch.where(torch.arange(ACTIONS) == 5, torch.nan, OF_LOGPROBS)
    hidden, head, targets = inputs()
    scores = scores_of(hidden, head, targets, LossGradients(lambda *_: (bad, None)))
    (bad * scores.logprobs_A).sum().backward()
    assert hidden.grad.isnan().any(1).tolist() == [row == 5 for row in range(ACTIONS)]


def test_one_chunk_and_passes_without_gradients_ask_for_no_slopes() -> None:
    def never(*_: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("derivatives of a pass that makes logits once anyway")

    hidden, head, targets = inputs()
    scores_of(hidden, head, targets, LossGradients(never), chunk=ACTIONS)
    with torch.no_grad():
        scores_of(hidden, head, targets, LossGradients(never))
