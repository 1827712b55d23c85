"""AdamW's settings: what decays, epsilon, and which of them a checkpoint carries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from fovea.errors import TrainError
from fovea.models.tiny import TinyParts
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.ranks import ALONE
from tests.policies import train_settings


def optimizer_of(parameters: dict[str, nn.Parameter], **train: object) -> Optimizer:
    settings = train_settings(lr_warmup_steps=0, **train)
    return Optimizer(parameters, settings, peak_learning_rate=settings.learning_rate, max_steps=10)


def two_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "scale": nn.Parameter(torch.randn(3, generator=generator)),
        "weight": nn.Parameter(torch.randn(3, 2, generator=generator)),
    }


def step(optimizer: Optimizer, number: int) -> None:
    optimizer.zero_grad()
    for index, parameter in enumerate(optimizer.parameters.values()):
        generator = torch.Generator().manual_seed(10 * number + index)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.set_rate(number)
    optimizer.clip()
    optimizer.step()


def values(optimizer: Optimizer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in optimizer.parameters.values()]


def test_what_decays_is_what_transformers_trainer_decays(parts: TinyParts) -> None:
    """All but norms and biases, by its lists of names and classes; norm1, norm2 and ln_q are on neither list."""
    named = dict(parts.network.named_parameters())
    before = {name: x.detach().clone() for name, x in named.items()}
    optimizer = optimizer_of(named, learning_rate=0.1, weight_decay=0.5)
    optimizer.zero_grad()
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.set_rate(0)
    optimizer.step()
    decayed = {name for name, x in named.items() if not torch.equal(x, before[name])}
    theirs = named.keys() & Trainer.get_decay_parameter_names(None, parts.network)  # type: ignore[arg-type]
    assert decayed <= theirs
    assert all(name.endswith(("norm1.weight", "norm2.weight", "ln_q.weight")) for name in theirs - decayed)
    torch.testing.assert_close(named[min(decayed)], before[min(decayed)] * 0.95)


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_one_step_is_the_papers(eps: float) -> None:
    """Loshchilov and Hutter, algorithm 2, written out for the first step."""
    settings: dict[str, object] = {"learning_rate": 0.1, "weight_decay": 0.5, "adam_eps": eps, "betas": (0.8, 0.9)}
    optimizer = optimizer_of(two_parameters(), **settings)
    before = values(optimizer)
    step(optimizer, 0)
    for old, new, index in zip(before, values(optimizer), (0, 1), strict=True):
        gradient = torch.randn(old.shape, generator=torch.Generator().manual_seed(index))
        kept = 1 - 0.1 * (0.5 if old.dim() > 1 else 0)
        torch.testing.assert_close(new, kept * old - 0.1 * gradient / (gradient.abs() + eps))


def test_settings_of_the_run_outlive_a_checkpoint(tmp_path: Path) -> None:
    """A resumed run has the moments of the checkpoint, and rate, decay and epsilon of its own settings."""
    given: dict[str, object] = {"learning_rate": 0.1, "weight_decay": 0.5}
    changed: dict[str, object] = {"learning_rate": 0.01, "weight_decay": 0.1, "adam_eps": 1e-3, "betas": (0.5, 0.6)}
    first = optimizer_of(two_parameters(), **given)
    step(first, 0)
    first.save(tmp_path, "policy", ALONE)
    resumed, by_hand = optimizer_of(two_parameters(), **changed), optimizer_of(two_parameters(), **given)
    resumed.load(tmp_path, "policy")
    by_hand.load(tmp_path, "policy")
    for group in by_hand._adamw.param_groups:
        group |= {"lr": 0.01, "eps": 1e-3, "betas": (0.5, 0.6)}
        group["weight_decay"] = 0.1 if group["weight_decay"] else 0.0
    step(resumed, 1)
    by_hand.zero_grad()
    for parameter, (index, other) in zip(
        by_hand.parameters.values(), enumerate(resumed.parameters.values()), strict=True
    ):
        parameter.grad = torch.randn(other.shape, generator=torch.Generator().manual_seed(10 + index))
    by_hand.step()
    for one, other in zip(values(resumed), values(by_hand), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_checkpoint_with_other_groups_is_no_silent_mix_up(tmp_path: Path) -> None:
    """Torch numbers moments by group: those of a weight would become those of another."""
    first = optimizer_of(two_parameters())
    step(first, 0)
    first.save(tmp_path, "policy", ALONE)
    state = torch.load(tmp_path / "policy_optimizer.pt", weights_only=True)
    one, two = state["param_groups"]
    state["param_groups"] = [one | {"params": [*one["params"], *two["params"]]}]
    torch.save(state, tmp_path / "policy_optimizer.pt")
    with pytest.raises(TrainError):
        optimizer_of(two_parameters()).load(tmp_path, "policy")
