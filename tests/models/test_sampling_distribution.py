"""Banned ids have probability 0 in every log-prob, entropy and gradient, against transformers' own mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from fovea.config.model import Lora, Model
from fovea.errors import TrainError
from fovea.models.heads import ValueHead
from fovea.models.plain import PlainVLM
from fovea.models.policy_network import PolicyNetwork
from fovea.models.sampling_distribution import banned_mass, sampling_logprobs_, sampling_weights_
from fovea.models.token_logprobs import TokenScores, token_scores
from fovea.models.trainable import choose_trainable
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.types import Batch
from tests.models.banned_ids import BANNED, TOLERANCE, VOCABULARY, favour_banned_ids, inputs
from tests.policies import make_batch, make_policy
from tests.reference import gradients, largest_relative_difference, reference_entropy, reference_logprobs
from tests.tiny_models import CPU, FAMILIES, mixed_prompts, random_completions, tiny

UNEQUAL = ((5, 1, 7), (3, 9), (4,))


def scores_of(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int) -> TokenScores:
    return token_scores(hidden, head, targets, torch.tensor(BANNED), temperature=temperature, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([[0.7], [1.0], [2.0]])])
def test_log_probs_are_those_of_transformers_processors(temperature: float | Tensor) -> None:
    logits = 4 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    rows = temperature.flatten().tolist() if isinstance(temperature, Tensor) else [temperature] * 3
    for row, (given, found) in enumerate(
        zip(logits.clone(), sampling_logprobs_(logits.clone(), temperature, torch.tensor(BANNED)), strict=True)
    ):
        processors = LogitsProcessorList([SuppressTokensLogitsProcessor(BANNED)])
        if rows[row] != 1:
            processors.insert(0, TemperatureLogitsWarper(rows[row]))
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
def test_scores_and_gradients_are_those_of_a_vocabulary_without_the_banned_ids(
    temperature: float, chunk_tokens: int
) -> None:
    hidden, head, targets = inputs()
    found = scores_of(hidden, head, targets, temperature, chunk_tokens)
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
    assert ours[1] is not None
    assert not ours[1][list(BANNED)].any(), "no gradient reaches a banned id"


def test_a_head_in_bfloat16_gives_finite_scores_and_gradients() -> None:
    hidden, head, targets = (each.detach() for each in inputs())
    hidden, head = (each.bfloat16().requires_grad_() for each in (hidden, head))
    found = scores_of(hidden, head, targets, 0.7, 4)
    (found.logprobs_A.sum() + found.entropies_A.sum()).backward()
    assert found.logprobs_A.dtype == found.entropies_A.dtype == torch.float32
    for each in (found.logprobs_A, found.entropies_A, hidden.grad, head.grad):
        assert each is not None
        assert each.isfinite().all()


def test_the_banned_mass_is_that_of_the_whole_vocabularys_softmax() -> None:
    hidden, head, targets = inputs()
    expected = (hidden @ head.t() / 0.7).softmax(-1)[:, list(BANNED)].sum(-1)
    found = scores_of(hidden, head, targets, 0.7, 4).banned_mass_A
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
    pairs = [(p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
    logprobs = torch.cat([reference_logprobs(parts, p, c, 0.7) for p, c in pairs])
    entropies = torch.cat([reference_entropy(parts, p, c, 0.7) for p, c in pairs])
    (logprobs.sum() + entropies.sum()).backward()
    expected = gradients(parts.network)
    vlm = kind(parts.network, parts.processor.banned_ids)
    row = pack_row(vlm.family, prompts, completions, CPU)
    found = vlm(row, temperature=0.7, chunk_tokens=10)
    (found.logprobs_A.sum() + found.entropies_A.sum()).backward()
    assert found.banned_mass_A.mean() > 0.5
    torch.testing.assert_close(found.logprobs_A, logprobs, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found.entropies_A, entropies, atol=TOLERANCE, rtol=0)
    assert largest_relative_difference(expected, gradients(parts.network)) < TOLERANCE


def test_values_do_not_depend_on_what_is_banned() -> None:
    values = []
    for banned in ((), (1, 2, 3)):
        parts = tiny("qwen3_vl")
        head = ValueHead(64, detach_trunk=False)
        torch.nn.init.constant_(head.linear.weight, 0.1)
        vlm = VLM(parts.network, banned, value_head=head)
        row = pack_row(vlm.family, mixed_prompts(parts), random_completions(UNEQUAL), CPU)
        values.append(vlm(row, temperature=1.0, chunk_tokens=1000).values_A)
    assert torch.equal(*values)


def with_banned_token(batch: Batch, banned: int, *, masked: bool) -> Batch:
    """A batch whose second sample of the first group has a banned token in its middle."""
    first, second, *rest = batch.groups[0].samples
    token_ids_T, mask_T = np.concatenate([second.token_ids_T] * 3), np.ones(3 * len(second.token_ids_T), dtype=np.bool_)
    token_ids_T[1], mask_T[1] = banned, not masked
    zeros_T = np.zeros(len(mask_T), dtype=np.float32)
    changed = replace(
        second, token_ids_T=token_ids_T, mask_T=mask_T, rollout_logprobs_T=zeros_T, advantages_T=zeros_T + 1
    )
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
