"""PPO on every kind of model: what of policy and critic is trained, and in which numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fovea.config.run import Config
from fovea.errors import TrainError
from fovea.models.trainable import VALUE_HEAD
from fovea.train.torch.policy import TorchPolicy, make_policy
from fovea.wiring.model import make_vlm
from tests.policies import make_batch
from tests.saved import save_policy, saved_tensors
from tests.tiny_models import tiny
from tests.train.ppo_policies import scored

TRUNKS = ("shared", "separate")
CRITIC = "critic."
UPDATES = 3
"""A value head begins at 0, and so does half of an adapter: behind both the first gradient is that of the third."""
SMALL_RATE = 1e-6


def built_policy(
    trunk: str, dtype: torch.dtype = torch.float32, rate: float = 1e-2, **settings: dict[str, object]
) -> TorchPolicy:
    """As a run builds it from its settings."""
    config = Config.model_validate(
        {
            "algorithm": {
                "name": "ppo",
                "ppo_epochs": 1,
                "advantage": {"critic": {"trunk": trunk, "learning_rate": rate}},
            },
            "train": {"learning_rate": 1e-3, "lr_warmup_steps": 0},
            **settings,
            "model": {"tiny": {}, "device": "cpu", **settings.get("model", {})},
        }
    )
    parts = tiny("qwen3_vl")
    for parameter in parts.network.parameters():
        parameter.data = parameter.data.to(dtype)
    return make_policy(config, make_vlm(config, parts.network, parts.processor.banned_ids))


def tensors(policy: TorchPolicy) -> dict[str, Tensor]:
    """Copies of all parameters and buffers; those of a model of its own begin with `critic.`."""
    assert policy.value_function is not None
    named = dict(policy.vlm.state_dict())
    if policy.value_function.model is not None:
        named |= {f"{CRITIC}{name}": x for name, x in policy.value_function.model.state_dict().items()}
    return {name: x.detach().clone() for name, x in named.items()}


def update(policy: TorchPolicy) -> tuple[set[str], set[str]]:
    """A few updates; the names of what has moved, and of what is as it was to the last bit."""
    before = tensors(policy)
    for seed in range(UPDATES):
        policy.update(scored(policy, make_batch(tiny("qwen3_vl"), seed)))
    after = tensors(policy)
    assert all(x.isfinite().all() for x in after.values())
    same = {name for name, x in after.items() if x.view(torch.uint8).equal(before[name].view(torch.uint8))}
    return after.keys() - same, same


def of_values(names: set[str]) -> set[str]:
    """The part of the value function."""
    return {name for name in names if name.startswith((VALUE_HEAD, CRITIC))}


@pytest.mark.parametrize("trunk", TRUNKS)
def test_adapters_and_value_function_train_and_nothing_below_them(trunk: str) -> None:
    policy = built_policy(trunk, model={"lora": {"rank": 4}})
    moved, same = update(policy)
    heads = {f"{CRITIC}head.linear.weight", f"{CRITIC}head.linear.bias"}
    heads = heads if trunk == "separate" else {f"{VALUE_HEAD}linear.weight", f"{VALUE_HEAD}linear.bias"}
    adapters = {name for name in moved | same if ".lora_" in name}
    assert moved == adapters | heads
    assert len(of_values(adapters)) == (len(adapters) / 2 if trunk == "separate" else 0)
    assert any("base_layer" in name for name in same)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_a_frozen_tower_stays_in_policy_and_critic_and_all_else_trains(trunk: str, tmp_path: Path) -> None:
    policy = built_policy(trunk, model={"freeze_vision_tower": True})
    moved, same = update(policy)
    towers = {name for name in moved | same if ".visual." in name}
    assert same == towers
    assert len(of_values(towers)) == (len(towers) / 2 if trunk == "separate" else 0)
    save_policy(policy, tmp_path)
    kept = [name for part in ("trainable", "value") for name in saved_tensors(tmp_path / part)]
    assert kept
    assert not any(".visual." in name for name in kept), "nor does it take memory of an optimizer"


def test_a_frozen_tower_of_the_critic_that_moves_is_noticed_before_it_is_saved(tmp_path: Path) -> None:
    policy = built_policy("separate", model={"freeze_vision_tower": True})
    save_policy(policy, tmp_path)
    assert policy.value_function is not None
    assert policy.value_function.model is not None
    name, frozen = next((n, p) for n, p in policy.value_function.model.named_parameters() if not p.requires_grad)
    with torch.no_grad():
        frozen.add_(1e-3)
    with pytest.raises(TrainError, match=name):
        save_policy(policy, tmp_path)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_every_weight_of_policy_and_critic_trains_in_bfloat16(trunk: str) -> None:
    _, same = update(built_policy(trunk, torch.bfloat16))
    assert same == set()


@pytest.mark.parametrize("trunk", TRUNKS)
def test_small_steps_of_policy_and_critic_add_up_in_bfloat16(trunk: str, tmp_path: Path) -> None:
    """In float32 copies, of which the model holds the rounding; a value head is float32 itself."""
    policy = built_policy(
        trunk, torch.bfloat16, rate=SMALL_RATE, train={"learning_rate": SMALL_RATE, "lr_warmup_steps": 0}
    )
    before = tensors(policy)
    update(policy)
    save_policy(policy, tmp_path)
    after = tensors(policy)
    for part, prefix in (("trainable", ""), ("value", CRITIC if trunk == "separate" else "")):
        masters = saved_tensors(tmp_path / part)
        assert masters
        for name, master in masters.items():
            parameter = after[f"{prefix}{name}"]
            assert master.dtype == torch.float32
            assert torch.equal(parameter, master.to(parameter.dtype)), name
            moved = (master - before[f"{prefix}{name}"].float()).abs()
            assert moved.max() < 2 * UPDATES * SMALL_RATE, name
            if "up_proj" in name:  # of an embedding the rows of other tokens stay
                assert (moved > 0).float().mean() > 0.99, name
