"""Every policy loss off-policy: gradient and metrics of an update against the loss written out on plain log-probs.

The log-probs from before the update, of the reference and of the engine all differ from the ones now, so far that both
clips, the dual clip and the cap of the weights take hold; no two settings are equal that could be exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea.algorithms.aggregation import sample_weights
from fovea.config.algorithm import Algorithm
from fovea.models.tiny import TinyParts
from fovea.samples import replace_samples
from fovea.types import Batch, Sample
from tests.policies import gradients_and_metrics, make_batch, make_policy
from tests.reference import gradients, largest_relative_difference, reference_entropy, reference_logprobs
from tests.tiny_models import tiny

TEMPERATURE = 0.9
LONGEST = 12
CAP, DUAL_CLIP, KL_COEF, ENTROPY_COEF = 1.3, 1.8, 0.3, 0.2
TAU_POSITIVE, TAU_NEGATIVE = 0.6, 1.7
CLIPS = {"clip": (0.2, 0.35), "gspo": (0.05, 0.1), "cispo": (0.3, 0.15), "sapo": (0.2, 0.2)}
"""Low and high; sapo's stand at their defaults, since it has none."""
CASES = [
    ("clip", "off", "k2", "token-mean"),
    ("clip", "token", "k3", "seq-mean-token-mean"),
    ("clip", "sequence", "in the reward", "seq-mean-token-sum"),
    ("gspo", "sequence", "k3", "seq-mean-token-mean"),
    ("gspo", "sequence_mask", "k2", "seq-mean-token-sum-norm"),
    ("cispo", "sequence_mask", "k3", "seq-mean-token-sum"),
    ("cispo", "off", "k2", "seq-mean-token-sum-norm"),
    ("sapo", "token", "k2", "token-mean"),
    ("sapo", "off", "k3", "seq-mean-token-sum"),
]
"""Loss, level of the weights for the engine, estimate of the KL, aggregation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One completion, all [T]: what is known of its tokens, what the loss makes of them."""

    old: Tensor
    ratio: Tensor
    weight: Tensor
    policy: Tensor
    """Loss of each token before KL and entropy."""
    whole: Tensor
    clipped: tuple[Tensor, Tensor]
    capped: Tensor
    kl_policy: Tensor
    kl_reference: Tensor


def moved_batch(parts: TinyParts, aggregation: str) -> Batch:
    """The batch of other tests with everything off from the log-probs now, and an advantage for every token."""
    rng = np.random.default_rng(1)

    def off(logprobs: np.ndarray, mean: float, deviation: float) -> np.ndarray:
        return (logprobs + rng.normal(mean, deviation, len(logprobs))).astype(np.float32)

    batch = make_batch(parts)
    now = iter(make_policy(parts).logprobs(batch))
    lengths = [len(sample.token_ids_T) for sample in batch.samples]
    weights = iter(sample_weights(aggregation, lengths, max_response_tokens=LONGEST))  # type: ignore[arg-type]

    def change(sample: Sample) -> Sample:
        logprobs = next(now)
        old = off(logprobs, -0.1, 0.6)
        return replace(
            sample,
            weight=float(next(weights)),
            old_logprobs_T=old,
            rollout_logprobs_T=off(old, -0.03, 0.4),
            reference_logprobs_T=off(logprobs, 0.2, 0.5),
            advantages_T=rng.normal(0, 1, len(logprobs)).astype(np.float32),
        )

    return replace_samples(batch, change)


def settings_of(loss: str, level: str, kl: str, aggregation: str) -> Algorithm:
    low, high = CLIPS[loss]
    bounds: dict[str, object] = {"clip_low": low, "clip_high": high}
    if loss == "clip":
        bounds["dual_clip"] = DUAL_CLIP
    if loss == "sapo":
        bounds = {"temperature_positive": TAU_POSITIVE, "temperature_negative": TAU_NEGATIVE}
    given: dict[str, object] = {"loss": {"name": loss, **bounds}, "aggregation": aggregation}
    given |= {"kl": {"coef": KL_COEF, **({"name": "reward"} if kl == "in the reward" else {"estimator": kl})}}
    given |= {"entropy_coef": ENTROPY_COEF}
    if level != "off":
        given |= {"importance_sampling_fix": True, "importance_sampling_level": level, "importance_sampling_clip": CAP}
    return Algorithm.model_validate(given)


def written_out(loss: str, level: str, kl: str, sample: Sample, lp: Tensor, entropy: Tensor) -> Row:
    """The formulas of one completion, one after the other."""
    given = (sample.old_logprobs_T, sample.rollout_logprobs_T, sample.reference_logprobs_T, sample.advantages_T)
    old, rollout, reference, advantage = (torch.tensor(values) for values in given)
    policy, ratio, clipped = policy_loss(loss, lp, old, advantage)
    weight, capped = torch.ones_like(lp), torch.zeros_like(lp)
    if level != "off":
        off = old - rollout
        weight = (off if level == "token" else off.sum().expand(len(off))).exp()
        capped = weight > CAP
        weight = weight * ~capped if level == "sequence_mask" else weight.clamp(max=CAP)
    whole = policy * weight - ENTROPY_COEF * entropy
    if kl == "k2":
        whole = whole + KL_COEF * (lp - reference) ** 2 / 2
    if kl == "k3":
        whole = whole + KL_COEF * ((reference - lp).exp() - (reference - lp) - 1)
    return Row(
        old=old,
        ratio=ratio,
        weight=weight,
        policy=policy * weight,
        whole=whole,
        clipped=clipped,
        capped=capped,
        # the actions are the old policy's: e^x - x - 1 of x = lp - lp_old
        kl_policy=(lp - old).exp() - (lp - old) - 1,
        kl_reference=(reference - lp).exp() - (reference - lp) - 1,
    )


def policy_loss(loss: str, lp: Tensor, old: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    low, high = CLIPS[loss]
    ratio = (lp - old).exp()
    if loss == "cispo":
        fixed = ratio.detach()
        return -fixed.clamp(1 - low, 1 + high) * advantage * lp, ratio, (fixed < 1 - low, fixed > 1 + high)
    if loss == "sapo":
        tau = torch.where(advantage > 0, TAU_POSITIVE, TAU_NEGATIVE)
        nowhere = torch.zeros_like(lp)
        return -advantage * 4 / tau * torch.sigmoid(tau * (ratio - 1)), ratio, (nowhere, nowhere)
    if loss == "gspo":
        ratio = (lp.detach() - old).mean().exp() * (lp - lp.detach()).exp()
    each = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    if loss == "clip":
        each = torch.where(advantage < 0, torch.minimum(each, -advantage * DUAL_CLIP), each)
    return each, ratio, ((ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0))


def aggregate(aggregation: str, losses: Sequence[Tensor]) -> Tensor:
    match aggregation:
        case "token-mean":
            return torch.cat(list(losses)).mean()
        case "seq-mean-token-mean":
            return torch.stack([loss.mean() for loss in losses]).mean()
        case "seq-mean-token-sum":
            return torch.stack([loss.sum() for loss in losses]).mean()
    return torch.cat(list(losses)).sum() / (len(losses) * LONGEST)


def rows_of(parts: TinyParts, batch: Batch, loss: str, level: str, kl: str) -> list[Row]:
    """By transformers' own forward, one completion at a time."""
    pairs = [(group.prompt, sample) for group in batch.groups for sample in group.samples]
    return [
        written_out(
            loss,
            level,
            kl,
            sample,
            reference_logprobs(parts, prompt, sample.token_ids_T, TEMPERATURE),
            reference_entropy(parts, prompt, sample.token_ids_T, TEMPERATURE),
        )
        for prompt, sample in pairs
    ]


def assert_that_all_take_hold(
    loss: str, level: str, rows: Sequence[Row], batch: Batch, low: float, high: float
) -> None:
    """Otherwise a case would pass without what it is about."""
    advantage = torch.cat([torch.tensor(sample.advantages_T) for sample in batch.samples])
    ratio, capped = (torch.cat([getattr(row, name).detach().float() for row in rows]) for name in ("ratio", "capped"))
    assert 0.05 < float(capped.mean()) < 0.45 or level == "off"
    assert (min(low, high) > 0.03 and low != high) or loss == "sapo"
    assert int(((ratio > DUAL_CLIP) & (advantage < 0)).sum()) >= 2 or loss != "clip"


@pytest.mark.parametrize("logits_mib", [512, 0.005], ids=["whole", "in chunks"])
@pytest.mark.parametrize(("loss", "level", "kl", "aggregation"), CASES)
def test_an_update_off_policy_is_that_of_the_written_out_loss(
    loss: str, level: str, kl: str, aggregation: str, logits_mib: float
) -> None:
    parts = tiny("qwen3_vl")
    batch = moved_batch(parts, aggregation)
    rows = rows_of(parts, batch, loss, level, kl)
    total = aggregate(aggregation, [row.whole for row in rows])
    total.backward()
    expected = {f"network.{name}": gradient for name, gradient in gradients(parts.network).items()}

    def mean(name: str) -> float:
        return float(torch.cat([getattr(row, name).detach().float() for row in rows]).mean())

    low, high = (float(torch.cat([row.clipped[side].float() for row in rows]).mean()) for side in (0, 1))
    assert_that_all_take_hold(loss, level, rows, batch, low, high)
    of_weights = {"importance/weight": mean("weight"), "importance/clipped_frac": mean("capped")}
    algorithm, backend = settings_of(loss, level, kl, aggregation), {"logits_mib": logits_mib}
    policy = make_policy(parts, algorithm=algorithm, max_tokens_per_microbatch=100, backend=backend)
    found, metrics = gradients_and_metrics(policy, batch)
    assert largest_relative_difference(expected, found) < 1e-4
    wanted = {
        "loss": float(total.detach()),
        "policy_loss": float(aggregate(aggregation, [row.policy.detach() for row in rows])),
        "ratio_mean": mean("ratio"),
        "clip_frac/low": low,
        "clip_frac/high": high,
        "kl/policy": mean("kl_policy"),
        "kl/reference": mean("kl_reference"),
    } | (of_weights if level != "off" else {})
    assert {key: metrics.get(key) for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert ("importance/weight" in metrics) is (level != "off")
