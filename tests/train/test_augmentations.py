"""Updates with a masked view of every picture, against two passes of transformers and the authors' formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm
from fovea.models.tiny import TinyParts
from fovea.samples import replace_samples
from fovea.train.base import Needs
from fovea.train.ranks import ALONE
from fovea.types import Batch, Metrics
from tests.augmentations import MASK, authors_vppo, low_var_kl
from tests.flops import NOT_COUNTED_BY_TORCH
from tests.policies import GRADIENT_TOLERANCE, NUM_TOKENS, make_batch, make_policy, update_gradients
from tests.reference import largest_relative_difference, reference_logprobs
from tests.tiny_models import mixed_prompts, tiny
from tests.train.rank_policies import policy_of, step

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
COEF, PENALTY, MASKED_PENALTY = 0.3, 0.2, 0.1
PAPO = {"name": "papo", "coef": COEF, "entropy_penalty": PENALTY, "masked_entropy_penalty": MASKED_PENALTY}
CONSTANT = Algorithm.model_validate({"augmentation": PAPO})
VPPO = Algorithm.model_validate({"augmentation": {"name": "vppo", "entropy_penalty": PENALTY}})


def masked_batch(parts: TinyParts) -> Batch:
    """The batch of other tests, with rewards and masked pictures."""
    rng, batch = np.random.default_rng(3), make_batch(parts)
    groups = zip(batch.groups, mixed_prompts(parts, MASK), strict=True)
    batch = Batch(groups=tuple(replace(group, masked=masked) for group, masked in groups))
    return replace_samples(batch, lambda sample: replace(sample, reward=float(rng.normal())))


def updated(parts: TinyParts, algorithm: Algorithm, **train: object) -> tuple[dict[str, Tensor], Metrics]:
    """Gradients and metrics of one step."""
    policy, batch = make_policy(parts, algorithm=algorithm, **train), masked_batch(parts)
    batch = policy.compute_logprobs(batch, Needs.of(algorithm))
    if algorithm is VPPO:
        batch, _ = with_advantages(batch, algorithm, 0.0)
    metrics: Metrics = {}
    update = policy.update
    policy.update = lambda batch: metrics.update(update(batch)) or metrics  # type: ignore[method-assign, func-returns-value]
    return update_gradients(policy, batch), metrics


def written_out(parts: TinyParts, algorithm: Algorithm) -> tuple[dict[str, Tensor], float]:
    """Gradients of the whole objective, one completion at a time through transformers; the dependence."""
    batch = masked_batch(parts)
    pairs = [(group, sample) for group in batch.groups for sample in group.samples]
    clean = [reference_logprobs(parts, group.prompt, sample.token_ids_T, 0.9) for group, sample in pairs]
    masked = [reference_logprobs(parts, group.masked, sample.token_ids_T, 0.9).detach() for group, sample in pairs]
    advantages = [torch.from_numpy(sample.advantages_T) for _, sample in pairs]
    if algorithm is VPPO:
        advantages = vppo_advantages(batch, clean, masked)
    loss, dependence = torch.zeros(()), 0.0
    for clean_T, masked_T, advantages_T in zip(clean, masked, advantages, strict=True):
        kl_T = low_var_kl(clean_T, masked_T)
        loss = loss - ((clean_T - clean_T.detach()).exp() * advantages_T).sum() - PENALTY * clean_T.sum()
        if algorithm is not VPPO:
            loss = loss - COEF * kl_T.sum() - MASKED_PENALTY * masked_T.sum()
        dependence += float(kl_T.detach().sum())
    (loss / NUM_TOKENS).backward()
    found = {f"network.{name}": p.grad.clone() for name, p in parts.network.named_parameters() if p.grad is not None}
    parts.network.zero_grad()
    return found, dependence / sum(map(len, clean))


def vppo_advantages(batch: Batch, clean: list[Tensor], masked: list[Tensor]) -> list[Tensor]:
    """GRPO's advantages times the authors' factors."""
    padded = [pad_sequence([x_T.detach() for x_T in rows], batch_first=True) for rows in (clean, masked)]
    mask_BT = pad_sequence([torch.ones(len(x_T)).bool() for x_T in clean], batch_first=True)
    factors_BT = authors_vppo(*padded, mask_BT, 0.4, 0.9)
    rewards = torch.tensor([[sample.reward for sample in group.samples] for group in batch.groups])
    values = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    return [value * factors_T[: len(x_T)] for value, factors_T, x_T in zip(values, factors_BT, clean, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("algorithm", [CONSTANT, VPPO], ids=["papo", "vppo"])
def test_gradients_are_those_of_two_passes(algorithm: Algorithm, family: str) -> None:
    expected, dependence = written_out(tiny(family), algorithm)
    found, metrics = updated(tiny(family), algorithm)
    assert largest_relative_difference(expected, found) < GRADIENT_TOLERANCE
    assert metrics["picture/dependence"] == pytest.approx(dependence, rel=1e-3)
    assert metrics["actions_trained"] == sum(len(s.token_ids_T) for s in make_batch(tiny(family)).samples)


def counted(algorithm: Algorithm) -> tuple[int, int]:
    """Floating point operations of scoring and of the update of a step, as torch counts them."""
    parts = tiny("qwen3_vl", hidden_size=128, num_heads=4, num_kv_heads=2, intermediate_size=512)
    policy, batch = make_policy(parts, algorithm=algorithm), masked_batch(parts)
    if algorithm.augmentation is None:
        batch = Batch(groups=tuple(replace(group, masked=None) for group in batch.groups))
    scoring, update = (FlopCounterMode(display=False, custom_mapping=NOT_COUNTED_BY_TORCH) for _ in range(2))
    with scoring:
        batch = policy.compute_logprobs(batch, Needs.of(algorithm))
    with update:
        policy.update(batch)
    return scoring.get_total_flops(), update.get_total_flops()


def test_the_masked_view_costs_a_scoring_pass() -> None:
    """A third of an update, which costs no more."""
    (nothing, plain), (scoring, update) = map(counted, (Algorithm(), CONSTANT))
    assert nothing == 0
    assert update == pytest.approx(plain, rel=0.01)
    assert scoring == pytest.approx(plain / 3, rel=0.1)


@pytest.mark.parametrize("settings", [{"max_tokens_per_microbatch": 150}, {"backend": {"logits_mib": 0.005}}], ids=str)
def test_any_split_gives_the_same_gradient(settings: dict[str, object]) -> None:
    """Of a group over rows, and of the logits."""
    found, _ = updated(tiny("qwen3_vl"), CONSTANT, **settings)
    assert largest_relative_difference(updated(tiny("qwen3_vl"), CONSTANT)[0], found) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("algorithm", [CONSTANT, VPPO], ids=["papo", "vppo"])
def test_a_rank_is_sent_the_pixels_of_both_views(algorithm: Algorithm) -> None:
    policy = policy_of(ALONE, algorithm.model_dump(include={"augmentation"}), train={"max_tokens_per_microbatch": 150})
    assert step(policy, masked_batch(tiny("qwen3_vl")))["picture/dependence"] > 0


def test_samples_of_noisy_pictures_are_no_measure_of_the_engine() -> None:
    """Without them the comparison is that of the others, which is not turned off."""
    batch = make_batch(tiny("qwen3_vl"))
    first, *others = batch.groups
    noisy = replace(first.samples[0], rollout_logprobs_T=np.full(5, -50.0, np.float32))
    whole = Batch(groups=(replace(first, samples=(replace(noisy, is_noisy=True), *first.samples[1:])), *others))
    without = Batch(groups=(replace(first, samples=first.samples[1:]), *others))
    found, expected = (make_policy(tiny("qwen3_vl")).update(each) for each in (whole, without))
    for key in ("mismatch/abs", "mismatch/kl", "mismatch/max", "mismatch_trained/abs"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5) != 0
