"""The trainer: its gradient against a loss written out on transformers' forward, and what must not change it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fovea.config.algorithm import Algorithm, ClippedLoss, KlInLoss
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.sections import Train
from fovea.errors import TrainError
from fovea.models.tiny import TinyParts
from fovea.models.trainable import FrozenGuard, choose_trainable, trainable_parameters
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.samples import replace_samples, with_old_logprobs, with_reference_logprobs
from fovea.train.adamw import AdamWSettings
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from tests.policies import (
    APART,
    GRADIENT_TOLERANCE,
    count_passes,
    make_batch,
    make_policy,
    micro_batcher,
    optimizer_steps,
    pairs_of,
    policy_on,
    train_settings,
    update_gradients,
    with_advantage,
    written_out_gradients,
)
from tests.reference import largest_relative_difference, reference_logprobs
from tests.saved import save_policy
from tests.tiny_models import FAMILIES, tiny


def test_gradient_is_that_of_the_written_out_loss(parts: TinyParts) -> None:
    batch = make_batch(parts)
    expected = written_out_gradients(parts, batch)
    assert largest_relative_difference(expected, update_gradients(make_policy(parts), batch)) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("settings", "num_rows"),
    [
        ({"max_tokens_per_microbatch": 300}, 2),
        ({"max_tokens_per_microbatch": 100}, 3),
        ({"max_tokens_per_microbatch": 75}, 5),
        ({"enable_dynamic_batch_size": False}, 3),
        ({"enable_dynamic_batch_size": False, "groups_per_microbatch": 2}, 2),
        ({"enable_dynamic_batch_size": False, "groups_per_microbatch": 3}, 1),
    ],
    ids=str,
)
def test_any_split_into_microbatches_gives_the_same_gradient_and_metrics(
    settings: dict[str, object], num_rows: int
) -> None:
    """75 tokens split the largest group itself, its prompt repeated."""
    results = []
    for cut in ({"max_tokens_per_microbatch": 10_000}, settings):
        parts = tiny("qwen3_vl")
        policy = make_policy(parts, algorithm=Algorithm(entropy_coef=0.1, loss=ClippedLoss(clip_high=0.3)), **cut)
        batch = make_batch(parts)
        passes = count_passes(policy)
        gradient = update_gradients(policy, batch)
        rows = len(passes)
        assert rows == (num_rows if cut is settings else 1)
        metrics = policy.update(batch)
        del metrics["memory/activations_gib"], metrics["microbatch/max_tokens"]
        assert 1 <= metrics.pop("balance/microbatches") <= rows, "1: alike; all work in one of them"
        results.append((gradient, metrics))
    (whole, whole_metrics), (split, split_metrics) = results
    assert largest_relative_difference(whole, split) < GRADIENT_TOLERANCE
    assert whole_metrics == pytest.approx(split_metrics, rel=1e-4, abs=1e-6)


def test_order_of_groups_and_samples_does_not_matter() -> None:
    parts = tiny("qwen3_vl")
    batch = make_batch(parts)
    turned = replace(batch, groups=tuple(replace(g, samples=g.samples[::-1]) for g in reversed(batch.groups)))
    first = update_gradients(make_policy(parts), batch)
    second = update_gradients(make_policy(tiny("qwen3_vl")), turned)
    assert largest_relative_difference(first, second) < GRADIENT_TOLERANCE


def test_a_group_without_advantage_adds_nothing() -> None:
    """Leaving it out is exact, since the weights of the others count its tokens all the same."""
    batch = make_batch(tiny("qwen3_vl"))
    without = replace(batch, groups=(batch.groups[0], batch.groups[2]))
    first = update_gradients(make_policy(tiny("qwen3_vl")), with_advantage(batch, 1, 0.0))
    second = update_gradients(make_policy(tiny("qwen3_vl")), without)
    assert largest_relative_difference(first, second) < GRADIENT_TOLERANCE


def test_a_completion_that_no_budget_holds_says_what_to_change() -> None:
    parts = tiny("qwen3_vl")
    with pytest.raises(TrainError, match=r"max_tokens_per_microbatch=20; set it to at least \d+, or lower"):
        make_policy(parts, max_tokens_per_microbatch=20).update(make_batch(parts))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens_per_microbatch": 80},
        {"max_tokens_per_microbatch": 300},
        {"enable_dynamic_batch_size": False, "groups_per_microbatch": 2},
    ],
    ids=str,
)
def test_logprobs_come_in_the_order_of_the_batch_under_any_split(parts: TinyParts, settings: dict[str, object]) -> None:
    batch = make_batch(parts)
    values = make_policy(parts, **settings).logprobs(batch)
    for (prompt, sample), logprobs in zip(pairs_of(batch), values, strict=True):
        expected = reference_logprobs(parts, prompt, sample.token_ids_T, temperature=0.9).detach()
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_rows_are_filled_out_of_order_where_that_evens_them_out() -> None:
    """The second group costs most: it comes alone, and the first and third share a row."""
    parts = tiny("qwen3_vl")
    batcher, batch = micro_batcher(parts, max_tokens_per_microbatch=300), make_batch(parts)
    assert [micro.sample_numbers for micro in batcher.micro_batches(batch.groups)] == [(0, 1, 2, 6, 7, 8), (3, 4, 5)]


def test_a_frozen_tower_makes_images_free() -> None:
    parts = tiny("qwen3_vl")
    group = make_batch(parts).groups[0]
    trained = micro_batcher(parts).assignment.cost.of(group)
    choose_trainable(parts.network, Model(tiny=TinyModel(), freeze_vision_tower=True), seed=0)
    frozen = micro_batcher(parts).assignment.cost
    assert frozen.of(group) == frozen.of(replace(group, prompt=replace(group.prompt, images=()))) < trained


def test_minibatches_take_that_many_optimizer_steps() -> None:
    parts = tiny("qwen3_vl")
    policy = make_policy(parts, algorithm=Algorithm(ppo_epochs=2, minibatches=3))
    batch = make_batch(parts)
    with optimizer_steps() as steps:
        policy.update(with_old_logprobs(batch, policy.logprobs(batch)))
    assert len(steps) == 6
    with pytest.raises(AssertionError, match="off-policy"):
        policy.update(batch)


def test_kl_term_pulls_towards_the_reference() -> None:
    """At the reference itself the k3 estimate has no gradient; away from it, it has."""
    parts = tiny("qwen3_vl")
    reference = VLM(tiny("qwen3_vl").network, parts.processor.banned_ids).requires_grad_(False)
    vlm = VLM(parts.network, parts.processor.banned_ids)
    algorithm = Algorithm(kl=KlInLoss(coef=1.0))
    policy = policy_on(vlm, Train(learning_rate=1e-3), algorithm, temperature=1.0, reference=reference)
    zero = silent(make_batch(parts))
    assert with_reference(policy, zero)["grad_norm"] == pytest.approx(0.0, abs=1e-5)
    with torch.no_grad():
        for parameter in parts.network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    away = with_reference(policy, zero)
    assert away["grad_norm"] > 1e-3
    assert with_reference(policy, zero)["kl/reference"] < away["kl/reference"]


def silent(batch: Batch) -> Batch:
    return replace_samples(batch, lambda sample: replace(sample, advantages_T=0 * sample.advantages_T))


def with_reference(policy: TorchPolicy, batch: Batch) -> dict[str, float]:
    return policy.update(with_reference_logprobs(batch, policy.reference_logprobs(batch)))


@pytest.mark.parametrize("lora", [False, True])
def test_frozen_vision_tower_stays_and_its_features_are_made_once(lora: bool, tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    settings = Model(tiny=TinyModel(), freeze_vision_tower=True, lora=Lora(rank=4) if lora else None)
    choose_trainable(parts.network, settings, seed=0)
    cache = FeatureCache(2**20)
    vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=cache)
    policy = policy_on(vlm, Train(learning_rate=1e-2), temperature=1.0)
    tower = {name: x.clone() for name, x in parts.network.get_submodule("model.visual").named_parameters()}
    batch = make_batch(parts)
    before = policy.logprobs(batch)
    for _ in range(3):
        policy.update(batch)
    assert cache.encoded_images == 3
    assert not np.allclose(before[0], policy.logprobs(batch)[0])
    for name, parameter in parts.network.get_submodule("model.visual").named_parameters():
        assert torch.equal(parameter, tower[name]), name
    save_policy(policy, tmp_path)  # which raises where a frozen parameter has moved


def test_the_guard_notices_a_frozen_parameter_that_moved(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, Model(tiny=TinyModel(), freeze_vision_tower=True), seed=0)
    policy = make_policy(parts)
    with torch.no_grad():
        next(parts.network.get_submodule("model.visual").parameters()).add_(1e-7)
    with pytest.raises(TrainError, match=r"network\.model\.visual"):
        save_policy(policy, tmp_path)


@pytest.mark.parametrize(
    ("family", "dtype", "train"),
    [
        *((family, torch.float32, {}) for family in FAMILIES),
        *((family, torch.float32, APART) for family in FAMILIES),
        ("qwen3_vl", torch.bfloat16, {"learning_rate": 1e-5}),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_a_loaded_policy_goes_on_bit_for_bit(
    family: str, dtype: torch.dtype, train: dict[str, object], tmp_path: Path
) -> None:
    def policy(seed: int = 0) -> TorchPolicy:
        parts = tiny(family, seed=seed)
        parts.network.to(dtype)
        return make_policy(parts, **train)

    batches = [make_batch(tiny(family), seed) for seed in range(4)]
    whole, first, second = policy(), policy(), policy(9)
    expected = [whole.update(batch) for batch in batches]
    for batch in batches[:2]:
        first.update(batch)
    save_policy(first, tmp_path)
    second.load(tmp_path)
    assert [second.update(batch) for batch in batches[2:]] == expected[2:]
    trained = (trainable_parameters(policy.vlm).items() for policy in (whole, second))
    for (name, a), (_, b) in zip(*trained, strict=True):
        assert torch.equal(a, b), name


def test_the_load_of_experts_is_that_of_the_update_alone() -> None:
    batch, policy = make_batch(tiny("qwen3_vl_moe")), make_policy(tiny("qwen3_vl_moe"))
    policy.logprobs(make_batch(tiny("qwen3_vl_moe"), seed=1))
    after_others = policy.update(batch)["expert_imbalance"]
    assert after_others == make_policy(tiny("qwen3_vl_moe")).update(batch)["expert_imbalance"]
    assert 1 < after_others < 2, "two of four experts"


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save_policy(make_policy(tiny("qwen3_vl")), tmp_path)
    with pytest.raises(TrainError, match=r"other trainable parameters .*; resume with the config\.yaml"):
        make_policy(tiny("qwen3_vl", num_layers=2)).load(tmp_path)


SCHEDULE = {"learning_rate": 1.0, "lr_warmup_steps": 2, "final_lr_frac": 0.2}


def rates(steps: Iterable[int], shape: str) -> list[float]:
    settings = AdamWSettings.of_run(train_settings(lr_schedule=shape, **SCHEDULE), max_steps=10)
    return [settings.rate(step) for step in steps]


def test_learning_rates_by_hand() -> None:
    assert rates([0, 1, 2, 9, 50], "constant") == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates([0, 2, 6, 10, 50], "linear") == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2])
    assert rates([2, 6, 10], "cosine") == pytest.approx([1.0, 0.6, 0.2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rl_starts_from_what_a_warm_up_made_and_so_does_a_resumed_run(dtype: torch.dtype, tmp_path: Path) -> None:
    """The float32 copies and the reference are made before the warm-up trains the model."""

    def policy_with_reference() -> TorchPolicy:
        parts, reference = tiny("qwen3_vl"), tiny("qwen3_vl")
        parts.network.to(dtype)
        reference.network.to(dtype)
        vlm, frozen = (VLM(each.network, each.processor.banned_ids) for each in (parts, reference))
        algorithm, frozen = Algorithm(kl=KlInLoss(coef=1.0)), frozen.requires_grad_(False)
        return policy_on(vlm, Train(learning_rate=1e-3), algorithm, temperature=1.0, reference=frozen)

    policy, batch = policy_with_reference(), make_batch(tiny("qwen3_vl"))
    cold = policy.reference_logprobs(batch)
    with torch.no_grad():
        for parameter in policy.vlm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    policy.snapshot_reference()
    warm = policy.logprobs(batch)
    assert not np.allclose(warm[0], cold[0], atol=1e-2)
    np.testing.assert_array_equal(policy.reference_logprobs(batch)[0], warm[0])
    with_reference(policy, batch)
    assert not np.array_equal(policy.logprobs(batch)[0], warm[0])
    assert np.abs(policy.logprobs(batch)[0] - warm[0]).max() < np.abs(cold[0] - warm[0]).max()
    save_policy(policy, tmp_path)
    resumed = policy_with_reference()
    resumed.load(tmp_path)
    np.testing.assert_array_equal(resumed.reference_logprobs(batch)[0], warm[0])
    np.testing.assert_array_equal(resumed.logprobs(batch)[0], policy.logprobs(batch)[0])


def test_no_gradient_is_left_in_memory_for_the_rollout() -> None:
    policy = make_policy(tiny("qwen3_vl"))
    policy.update(make_batch(tiny("qwen3_vl")))
    assert all(weight.grad is None for weight in policy.vlm.parameters())


def test_the_schedule_reaches_the_optimizer() -> None:
    parts = tiny("qwen3_vl")
    policy, batch = make_policy(parts, lr_schedule="linear", **SCHEDULE), make_batch(parts)
    expected, seen = rates(range(10), "linear"), list[float]()
    handle = register_optimizer_step_pre_hook(lambda adamw, *_: seen.append(adamw.param_groups[0]["lr"]))
    assert [policy.update(batch)["learning_rate"] for _ in range(10)] == expected
    handle.remove()
    assert seen == expected


def test_a_minibatch_stands_for_the_whole_batch_by_its_groups() -> None:
    """Each of three minibatches of one group counts three times."""
    parts = tiny("qwen3_vl")
    batch = make_batch(parts)
    first_only = replace_samples(Batch(groups=batch.groups[:1]), lambda s: replace(s, weight=3 * s.weight))
    policy = make_policy(parts, algorithm=Algorithm(minibatches=3))
    with optimizer_steps() as seen:
        policy.update(with_old_logprobs(batch, policy.logprobs(batch)))
    alone = update_gradients(make_policy(tiny("qwen3_vl")), first_only)
    assert len(seen) == 3
    assert largest_relative_difference(alone, seen[0]) < GRADIENT_TOLERANCE


CHANGED: dict[str, Callable[[torch.Tensor], object]] = {
    "one bit": lambda x: x[0, 0].copy_(torch.nextafter(x[0, 0], torch.tensor(9.0))),
    "all signs": torch.Tensor.neg_,
    "rows swapped": lambda x: x.copy_(x.flip(0)),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_the_guard_sees_every_kind_of_change(change: Callable[[torch.Tensor], object]) -> None:
    parts = tiny("qwen3_vl")
    parts.network.requires_grad_(False)
    guard, name = FrozenGuard(parts.network), "model.visual.merger.linear_fc1.weight"
    with torch.no_grad():
        change(parts.network.get_parameter(name))
    with pytest.raises(TrainError, match=rf"1 frozen parameters changed, first {re.escape(name)}"):
        guard.check(parts.network)
