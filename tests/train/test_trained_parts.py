"""Parts of the model that are trained in different ways: rates of learning, adapters on vision, dropout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fovea.config.algorithm import Algorithm, KlInLoss
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.run import Config
from fovea.models.modules import family_of_network
from fovea.models.plain import PlainVLM
from fovea.models.trainable import choose_trainable, part_of, trainable_parameters
from fovea.models.vlm import VLM
from fovea.samples import replace_samples
from fovea.train.base import Needs
from fovea.train.torch.policy import TorchPolicy
from fovea.train.torch.policy import make_policy as policy_of_run
from fovea.types import Batch
from fovea.wiring.engine import make_tape
from fovea.wiring.model import make_vlm
from tests.policies import (
    APART,
    GRADIENT_TOLERANCE,
    RATES,
    make_batch,
    make_policy,
    policy_on,
    train_settings,
    update_gradients,
    weights_of,
    written_out_gradients,
)
from tests.reference import largest_relative_difference
from tests.saved import save_policy
from tests.tiny_models import FAMILIES, tiny
from tests.train.rank_policies import step

EVERYWHERE = Lora(rank=4, parts=("language_model", "vision_tower", "projector"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, EVERYWHERE], ids=["weights", "adapters"])
def test_tower_and_projector_move_as_in_runs_with_their_learning_rates(lora: Lora | None, family: str) -> None:
    """In the first update, where the gradient is the same."""

    def updated(**train: object) -> dict[str, torch.Tensor]:
        parts = tiny(family)
        choose_trainable(parts.network, Model(tiny=TinyModel(), lora=lora), seed=0)
        policy = make_policy(parts, **train)
        policy.update(make_batch(parts))
        return dict(trainable_parameters(policy.vlm))

    by_rate = {rate: updated(learning_rate=rate) for rate in RATES.values()}
    apart, seen, model = updated(**APART), set[str](), family_of_network(tiny(family).network)
    for name, weight in apart.items():
        part = part_of(name.removeprefix("network.").partition(".lora_")[0], model)
        seen.add(part)
        assert torch.equal(weight, by_rate[RATES.get(part, RATES["language model"])][name]), name
    assert seen >= RATES.keys()


@pytest.mark.parametrize("lora", [EVERYWHERE, Lora(rank=4, parts=("vision_tower",))], ids=["everywhere", "tower"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_adapters_are_those_of_the_written_out_loss(family: str, lora: Lora) -> None:
    """A micro-batch of text has none under adapters on the tower only."""
    parts = tiny(family)
    choose_trainable(parts.network, Model(tiny=TinyModel(), lora=lora), seed=0)
    with torch.no_grad():
        for name, parameter in parts.network.named_parameters():
            if "lora_B" in name:  # zero at the start, and the gradients of A with it
                parameter.normal_(std=0.03, generator=torch.Generator().manual_seed(len(name)))
    batch = make_batch(parts)
    assert [bool(group.images) for group in batch.groups] == [True, True, False]
    expected, policy = written_out_gradients(parts, batch), make_policy(parts, enable_dynamic_batch_size=False)
    assert largest_relative_difference(expected, update_gradients(policy, batch)) < GRADIENT_TOLERANCE


def test_steps_of_no_one_and_two_pictures_are_the_same_on_the_plain_path_under_a_reference() -> None:
    """Each step has prompts of one number of pictures only, so that the tower has a gradient in some steps."""
    rng = np.random.default_rng(0)
    batch = replace_samples(make_batch(tiny("qwen3_vl")), lambda sample: replace(sample, reward=float(rng.normal())))
    one, two, none = batch.groups
    assert [len(group.images) for group in (none, one, two)] == [0, 1, 2]
    before = {name: weight.detach().clone() for name, weight in tiny("qwen3_vl").network.named_parameters()}
    metrics, changes = [], []
    for path in (VLM, PlainVLM):
        parts, frozen = tiny("qwen3_vl"), tiny("qwen3_vl")
        vlm, reference = (path(each.network, parts.processor.banned_ids) for each in (parts, frozen))
        settings = train_settings(lr_warmup_steps=0), Algorithm(kl=KlInLoss(coef=0.5))
        policy = policy_on(vlm, *settings, reference=reference.requires_grad_(False))
        metrics.append([step(policy, Batch(groups=(group,))) for group in (none, one, two)])
        changes.append({name: weight.detach() - before[name] for name, weight in parts.network.named_parameters()})
    for number, (fast, plain) in enumerate(zip(*metrics, strict=True)):
        for key in ("loss", "grad_norm", "kl/reference"):
            assert fast[key] == pytest.approx(plain[key], rel=1e-3, abs=1e-6), (number, key)
    assert [steps["kl/reference"] > 1e-6 for steps in metrics[0]] == [False, True, True], "a step moves the policy away"
    for name, change in changes[0].items():
        # Adam's step of a gradient near zero is rounding
        assert (change - changes[1][name]).norm() <= 0.02 * change.norm(), name
    assert any(change.any() for name, change in changes[0].items() if ".visual." in name)


def settings(dropout: float) -> Config:
    return Config.model_validate(
        {
            "model": {"tiny": {}, "lora": {"rank": 4, "dropout": dropout}},
            "train": {"learning_rate": 1e-2, "lr_warmup_steps": 0, "plain_update_every_steps": 1},
        }
    )


def policy_with(dropout: float) -> TorchPolicy:
    network = tiny("qwen3_vl").network.eval()
    policy = policy_of_run(settings(dropout), make_vlm(settings(dropout), network, banned_ids=()))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:  # zero at the start: dropping what it is multiplied with would change nothing
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return policy


def stepped(policy: TorchPolicy, seed: int = 0) -> dict[str, float]:
    config = settings(0.5)
    batch = make_batch(tiny("qwen3_vl"), seed)
    return policy.update(policy.compute_logprobs(batch, Needs.of(config.algorithm, dropout=config.model.has_dropout)))


def test_old_logprobs_are_those_that_sampled() -> None:
    """The ratio is of the dropped-out network to the whole one, and what the engine is compared with is whole."""
    plain, dropped = policy_with(0.0), policy_with(0.5)
    batch = make_batch(tiny("qwen3_vl"))
    needs = Needs.of(settings(0.5).algorithm, dropout=settings(0.5).model.has_dropout)
    assert needs.old_logprobs
    scored = (policy.compute_logprobs(batch, needs).samples for policy in (dropped, plain))
    for ours, theirs in zip(*scored, strict=True):
        np.testing.assert_allclose(ours.old_logprobs_T, theirs.old_logprobs_T, atol=1e-5)
    with_it, without = stepped(dropped), stepped(plain)
    assert with_it["mismatch/kl"] == pytest.approx(without["mismatch/kl"], rel=1e-5)
    assert without["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert abs(with_it["ratio_mean"] - 1) > 1e-3


def test_a_resumed_run_drops_the_same_inputs(tmp_path: Path) -> None:
    """Whatever else has drawn from torch's generator, which an update leaves as it was."""
    whole, resumed = policy_with(0.5), policy_with(0.5)
    stepped(whole)
    save_policy(whole, tmp_path)
    state = torch.get_rng_state()
    stepped(whole, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    resumed.load(tmp_path)
    stepped(resumed, 1)
    for (name, one), (_, other) in zip(weights_of(whole).items(), weights_of(resumed).items(), strict=True):
        assert torch.equal(one, other), name


def test_the_outputs_of_a_rollout_are_not_those_of_an_update_with_dropout() -> None:
    vlm = make_vlm(settings(0.5), tiny("qwen3_vl").network, banned_ids=())
    assert make_tape(settings(0.5), vlm) is None
    assert make_tape(settings(0.0), vlm) is not None
