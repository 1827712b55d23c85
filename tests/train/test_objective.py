"""Gradients and metrics of updates against objectives that are written out: off-policy, in chunks, masked pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode

from fovea.advantages import with_advantages
from fovea.algorithms.aggregation import sample_weights
from fovea.config.algorithm import Algorithm
from fovea.models.tiny import TinyParts
from fovea.samples import replace_samples
from fovea.train.base import Needs
from fovea.train.loss import can_precompute_gradients
from fovea.train.ranks import ALONE
from fovea.train.torch import passes
from fovea.types import Batch, Metrics, Sample
from tests.augmentations import MASK, authors_vppo, low_var_kl
from tests.flops import NOT_COUNTED_BY_TORCH
from tests.policies import (
    GRADIENT_TOLERANCE,
    NUM_TOKENS,
    PPO,
    batch_of,
    gradients_and_metrics,
    make_batch,
    make_policy,
    pairs_of,
    policy_gradients,
    ppo_policy,
    scored,
    update_gradients,
)
from tests.reference import largest_relative_difference, reference_entropy, reference_logprobs
from tests.tiny_models import mixed_prompts, tiny
from tests.train.rank_policies import policy_of, step

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
    entropy: Tensor
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
        entropy=entropy,
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
    rows = []
    for prompt, sample in pairs_of(batch):
        given = parts, prompt, sample.token_ids_T, TEMPERATURE
        rows.append(written_out(loss, level, kl, sample, reference_logprobs(*given), reference_entropy(*given)))
    return rows


def assert_all_take_hold(loss: str, level: str, rows: Sequence[Row], batch: Batch, bounds: Sequence[float]) -> None:
    """Otherwise a case would pass without what it is about."""
    advantage = torch.cat([torch.tensor(sample.advantages_T) for sample in batch.samples])
    ratio, capped = (torch.cat([getattr(row, name).detach().float() for row in rows]) for name in ("ratio", "capped"))
    assert 0.05 < float(capped.mean()) < 0.45 or level == "off"
    assert (min(bounds) > 0.03 and bounds[0] != bounds[1]) or loss == "sapo"
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
    expected = policy_gradients(parts.network)

    def mean(name: str) -> float:
        return float(torch.cat([getattr(row, name).detach().float() for row in rows]).mean())

    low, high = (float(torch.cat([row.clipped[side].float() for row in rows]).mean()) for side in (0, 1))
    assert_all_take_hold(loss, level, rows, batch, (low, high))
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
        "entropy": mean("entropy"),
        "kl/policy": mean("kl_policy"),
        "kl/reference": mean("kl_reference"),
    } | (of_weights if level != "off" else {})
    assert {key: metrics.get(key) for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert ("importance/weight" in metrics) is (level != "off")


IN_CHUNKS = {"logits_mib": 0.005}
"""Of four actions of the tiny model."""
OF_COMPLETIONS = {"importance_sampling_fix": True, "importance_sampling_level": "sequence"}
LOSSES: dict[str, dict[str, object]] = {
    "clip": {},
    "dual clip": {"loss": {"name": "clip", "dual_clip": 1.5}, "entropy_coef": 0.1},
    "cispo": {"loss": {"name": "cispo"}, "entropy_coef": 0.1},
    "sapo": {"loss": {"name": "sapo"}},
    "gspo": {"loss": {"name": "gspo"}, "entropy_coef": 0.1},
    "weighed": {"importance_sampling_fix": True, "kl": {"coef": 0.3, "estimator": "k3"}},
    "weighed by completion": OF_COMPLETIONS,
}


def update(algorithm: Algorithm, batch: Batch) -> tuple[dict[str, torch.Tensor], Metrics, int]:
    """Gradients, metrics and operations of an update in chunks."""
    policy = make_policy(tiny("qwen3_vl"), algorithm=algorithm, backend=IN_CHUNKS, lr_warmup_steps=0)
    with FlopCounterMode(display=False) as counter:
        found, metrics = gradients_and_metrics(policy, batch)
    del metrics["memory/activations_gib"]
    return found, metrics, counter.get_total_flops()


@pytest.mark.parametrize("on_policy", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_update_is_that_of_a_second_pass_over_the_logits(
    loss: str, on_policy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, batch = Algorithm.model_validate(LOSSES[loss]), batch_of(on_policy=on_policy)
    found, metrics, operations = update(algorithm, batch)
    monkeypatch.setattr(passes, "precomputed_loss_gradients", lambda *_: None)
    twin, twin_metrics, twin_operations = update(algorithm, batch)
    assert largest_relative_difference(twin, found) < GRADIENT_TOLERANCE
    assert metrics == pytest.approx(twin_metrics, rel=1e-5)
    head = tiny("qwen3_vl").network.get_output_embeddings().weight.numel()
    unequal = sum(len(sample.token_ids_T) for sample in make_batch(tiny("qwen3_vl")).samples)
    known = can_precompute_gradients(algorithm, on_policy=on_policy)
    assert twin_operations - operations == (2 * unequal * head if known else 0)


def test_gradients_are_precomputed_but_where_a_completion_has_one_ratio() -> None:
    known = {
        (loss, on_policy): can_precompute_gradients(Algorithm.model_validate(settings), on_policy=on_policy)
        for loss, settings in LOSSES.items()
        for on_policy in (True, False)
    }
    unknown = {case for case, is_known in known.items() if not is_known}
    assert unknown == {("gspo", False), ("weighed by completion", True)}


def test_values_of_a_shared_trunk_train_beside_them() -> None:
    found = []
    for known in (True, False):
        backend = IN_CHUNKS if known else {}
        policy = ppo_policy(tiny("qwen3_vl"), algorithm=PPO.model_copy(update={"entropy_coef": 0.1}), backend=backend)
        found.append(update_gradients(policy, scored(policy, make_batch(tiny("qwen3_vl")))))
    assert largest_relative_difference(found[1], found[0]) < GRADIENT_TOLERANCE


def test_a_minibatch_stands_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss is scaled, and so are its precomputed gradients: others would be refused."""
    algorithm, batch = Algorithm(minibatches=3, max_policy_kl=None), batch_of(on_policy=False)
    found, metrics, _ = update(algorithm, batch)
    assert metrics["epochs_run"] == 1
    monkeypatch.setattr(passes, "precomputed_loss_gradients", lambda *_: None)
    assert largest_relative_difference(update(algorithm, batch)[0], found) < GRADIENT_TOLERANCE


def test_a_loss_that_is_not_finite_skips_the_update_as_ever() -> None:
    algorithm = Algorithm.model_validate({"kl": {"coef": 0.1}})
    policy = make_policy(tiny("qwen3_vl"), algorithm=algorithm, backend=IN_CHUNKS, lr_warmup_steps=0)
    batch = batch_of(on_policy=True)
    first, *others = batch.groups
    bad = replace(first.samples[0], reference_logprobs_T=np.full_like(first.samples[0].rollout_logprobs_T, np.nan))
    batch = Batch(groups=(replace(first, samples=(bad, *first.samples[1:])), *others))
    assert policy.update(batch)["updates_skipped"] == 1


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
    return gradients_and_metrics(policy, batch)


def written_out_with_masks(parts: TinyParts, algorithm: Algorithm) -> tuple[dict[str, Tensor], float]:
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
    return policy_gradients(parts.network), dependence / sum(map(len, clean))


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
    expected, dependence = written_out_with_masks(tiny(family), algorithm)
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
