"""The update on completions of older weights, against autograd over transformers' own log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fovea.config.algorithm import Algorithm
from fovea.models.tiny import TinyParts
from fovea.samples import with_old_logprobs
from fovea.train.base import Needs
from fovea.types import Batch
from tests.policies import NUM_TOKENS, make_batch, make_policy, update_gradients
from tests.reference import gradients, largest_relative_difference, reference_logprobs
from tests.tiny_models import tiny

GRADIENT_TOLERANCE = 1e-5
CORRECTED = Algorithm(importance_sampling_fix=True)
CAP = 2.0


def with_engine_logprobs(parts: TinyParts, batch: Batch) -> Batch:
    """The batch as an engine with the present weights would have drawn it."""
    groups = []
    for group in batch.groups:
        logprobs = [reference_logprobs(parts, group.prompt, sample.token_ids_T, 0.9) for sample in group.samples]
        pairs = zip(group.samples, logprobs, strict=True)
        groups.append(
            replace(group, samples=tuple(replace(s, rollout_logprobs_T=lp.detach().numpy()) for s, lp in pairs))
        )
    return replace(batch, groups=tuple(groups))


TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probs, engine's log-probs, advantages), [T] each, -> losses [T]"""


def weighed_loss(logprobs_T: torch.Tensor, engines_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    """- A min(p / p_engine, CAP) log p, the ratio without gradient."""
    return -advantages_T * (logprobs_T.detach() - engines_T).exp().clamp(max=CAP) * logprobs_T


def clipped_loss(logprobs_T: torch.Tensor, engines_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    """PPO's loss (arXiv 1707.06347, eq. 7) of the ratio p / p_engine, with a dual clip (arXiv 1912.09729, eq. 5)."""
    ratio_T = (logprobs_T - engines_T).exp()
    gain_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
    return -torch.where(advantages_T < 0, torch.maximum(gain_T, 3 * advantages_T), gain_T)


def expected_gradient(parts: TinyParts, batch: Batch, loss: TokenLoss) -> dict[str, torch.Tensor]:
    """Gradient of the loss over all tokens, through transformers' own log-probs."""
    parts.network.zero_grad()
    losses = []
    for group in batch.groups:
        for sample in group.samples:
            logprobs_T = reference_logprobs(parts, group.prompt, sample.token_ids_T, 0.9)
            assert sample.advantages_T is not None
            given = torch.from_numpy(sample.rollout_logprobs_T), torch.from_numpy(sample.advantages_T)
            losses.append(loss(logprobs_T, *given).sum() / NUM_TOKENS)
    torch.stack(losses).sum().backward()
    return {f"network.{name}": gradient for name, gradient in gradients(parts.network).items()}


@pytest.mark.parametrize("minibatches", [1, 2], ids=["old log-probs of the update", "of a pass before it"])
def test_a_stale_token_counts_as_much_more_as_it_has_become_more_probable(minibatches: int) -> None:
    """Drawn by the weights of before an update, trained on after it."""
    parts = tiny("qwen3_vl")
    algorithm = CORRECTED.model_copy(update={"minibatches": minibatches})
    policy = make_policy(parts, algorithm=CORRECTED, learning_rate=0.02, lr_warmup_steps=0)
    drawn = with_engine_logprobs(parts, make_batch(parts))
    policy.update(drawn)
    # the pass before an update of several steps is one over the newest weights, too
    stale = policy.compute_logprobs(drawn, Needs.of(algorithm))
    expected = expected_gradient(parts, stale, weighed_loss)
    ratios = torch.cat([torch.from_numpy(s.rollout_logprobs_T) for s in drawn.samples])
    assert (torch.cat(list(map(torch.from_numpy, policy.logprobs(drawn)))) - ratios).abs().mean() > 0.05, "stale"
    assert largest_relative_difference(expected, update_gradients(policy, stale)) < GRADIENT_TOLERANCE


def test_a_ratio_to_the_engine_is_clipped_for_what_older_weights_and_the_update_change_together() -> None:
    """A token that has moved too far since it was drawn has no gradient, though this update has not moved it yet."""
    parts = tiny("qwen3_vl")
    policy = make_policy(parts, algorithm=Algorithm(old_logprobs="engine"), learning_rate=0.02, lr_warmup_steps=0)
    drawn = with_engine_logprobs(parts, make_batch(parts))
    policy.update(drawn)
    stale = with_old_logprobs(drawn, [sample.rollout_logprobs_T for sample in drawn.samples])
    expected = expected_gradient(parts, stale, clipped_loss)
    unclipped = expected_gradient(parts, stale, lambda new, old, advantages: -(new - old).exp() * advantages)
    assert largest_relative_difference(unclipped, expected) > 0.05, "clipped"
    assert largest_relative_difference(expected, update_gradients(policy, stale)) < GRADIENT_TOLERANCE
    metrics = policy.update(stale)
    assert metrics["mismatch_trained/abs"] > 0.01, "still the engine against the trainer"
