"""Checkpoints of a Megatron policy: training goes on from one as if it had never stopped, and others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fovea.config.backends import MegatronBackend
from fovea.config.model import Model
from fovea.errors import TrainError
from fovea.models.load import load_network
from fovea.models.processor import load_processor
from fovea.models.trainable import adapted_weights, choose_trainable, factored_weights, merged
from fovea.train.base import Needs
from fovea.train.megatron.checkpoint import COUNTS, STATE
from fovea.train.model_division import check_division, check_experts
from fovea.train.torch.sharding import copy_weights
from fovea.wiring.megatron import saved_by_megatron
from fovea_gym.errors import ConfigError
from tests.policies import make_batch, named, weights_of, with_advantage
from tests.tiny_models import save, tiny
from tests.train.megatron.equal_steps import (
    NUM_STEPS,
    SAVED_AFTER,
    SIZES,
    Steps,
    megatron_policy,
    mixed_pairs,
    run_steps,
    settings_of,
)

FAMILY = "qwen3_vl"
PPO = settings_of(Path("model"), "ppo").algorithm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny(FAMILY, **SIZES), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    """A checkpoint after three steps, and the steps after it of the policy that wrote it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with megatron_policy(model, "ppo") as policy:
        run_steps(policy, tiny(FAMILY, **SIZES), PPO, range(SAVED_AFTER))
        policy.save(folder)
        policy.finish_save()
        return folder, run_steps(policy, tiny(FAMILY, **SIZES), PPO, range(SAVED_AFTER, NUM_STEPS))


def test_a_resumed_policy_takes_the_steps_of_one_that_never_stopped(model: Path, saved: tuple[Path, Steps]) -> None:
    folder, straight = saved
    with megatron_policy(model, "ppo") as policy:
        policy.load(folder)
        resumed = run_steps(policy, tiny(FAMILY, **SIZES), PPO, range(SAVED_AFTER, NUM_STEPS))
    found, expected = ((each.metrics, each.logprobs, each.values) for each in (resumed, straight))
    assert found == expected
    assert resumed.weights.keys() == straight.weights.keys()
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in straight.weights.items())


def test_updates_that_were_skipped_before_a_checkpoint_count_after_it(model: Path, tmp_path: Path) -> None:
    bad = with_advantage(named(make_batch(tiny(FAMILY, **SIZES))), 1, np.nan)
    limit = {"max_skipped_updates": 1}
    with megatron_policy(model, train=limit) as policy:
        assert policy.update(policy.compute_logprobs(bad, Needs(old_logprobs=True)))["updates_skipped"] == 1
        policy.save(tmp_path)
    with megatron_policy(model, train=limit) as policy:
        policy.load(tmp_path)
        with pytest.raises(TrainError, match=r"at step 2, as in all of the last 2 updates, with the samples of row 1;"):
            policy.update(policy.compute_logprobs(bad, Needs(old_logprobs=True)))


def test_its_weights_are_read_without_the_policy(model: Path, saved: tuple[Path, Steps]) -> None:
    config = settings_of(model, "ppo", train={"backend": {"name": "megatron", "tensor_parallel_size": 2}})
    read = saved_by_megatron(config, config.model, load_processor(config.model).banned_ids, saved[0])
    with megatron_policy(model, "ppo") as policy:
        policy.load(saved[0])
        loaded = weights_of(policy)
        assert read.weights.keys() == loaded.keys()
        assert all(torch.equal(read.weights[name], weight) for name, weight in loaded.items())
    assert read.left_out == ("value",)
    assert any(not torch.equal(read.weights[name], saved[1].weights[name]) for name in loaded), "steps change weights"


def test_an_export_has_the_weights_as_they_are(model: Path, tmp_path: Path) -> None:
    with megatron_policy(model) as policy:
        policy.sft(mixed_pairs(tiny(FAMILY, **SIZES)))
        policy.export(tmp_path)
        weights = weights_of(policy)
        trained = {weight.name for weight in policy.weights_to_sync() if weight.is_trained}
    exported = dict(load_network(Model(path=str(tmp_path), dtype="float32")).named_parameters())
    assert exported.keys() == weights.keys() == trained
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())


def test_an_export_has_its_adapters_merged(model: Path, tmp_path: Path) -> None:
    """By peft's own sum of a weight and its adapter."""
    config = settings_of(model, "grpo, lora")
    with megatron_policy(model, "grpo, lora") as policy:
        policy.sft(mixed_pairs(tiny(FAMILY, **SIZES)))
        policy.sft(mixed_pairs(tiny(FAMILY, **SIZES)))  # the first step moves one of the two matrices only
        policy.export(tmp_path)
        factors = weights_of(policy)
        synced = {weight.name: weight.is_trained for weight in policy.merged_weights_to_sync()}
    network = load_network(config.model)
    choose_trainable(network, config.model, seed=1)  # other first values
    copy_weights(factors, dict(factored_weights(network)))
    expected = {name: merged(parameter, adapter) for name, parameter, adapter in adapted_weights(network)}
    exported = dict(load_network(Model(path=str(tmp_path), dtype="float32")).named_parameters())
    assert exported.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(exported[name], weight, msg=name)
    before = dict(load_network(config.model).named_parameters())
    changed = [name for name, weight in before.items() if not torch.equal(weight, exported[name])]
    assert changed == [name for name in exported if synced[name]]
    assert changed


def test_a_checkpoint_with_a_part_missing_is_named(model: Path, saved: tuple[Path, Steps], tmp_path: Path) -> None:
    (tmp_path / COUNTS).write_text((saved[0] / COUNTS).read_text())
    (tmp_path / STATE).mkdir()
    with megatron_policy(model, "ppo") as policy, pytest.raises(TrainError, match=str(tmp_path)):
        policy.load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(saved: tuple[Path, Steps], tmp_path: Path) -> None:
    other = save(tiny(FAMILY, **SIZES | {"num_layers": 3}), tmp_path)
    with megatron_policy(other, "ppo") as policy, pytest.raises(TrainError, match=r"checkpoint0: .*shape mismatch"):
        policy.load(saved[0])


@pytest.mark.parametrize(
    ("family", "backend", "message"),
    [
        (FAMILY, {"tensor_parallel_size": 2}, "tensor_parallel_size=2 .*number of training processes, 1; start a mul"),
        (FAMILY, {"expert_parallel_size": 2}, "expert_parallel_size=2 .*training processes of .*, 1; start a mul"),
        ("qwen2_vl", {}, "is a qwen2_vl, and only qwen2_5_vl and qwen3_vl .* set train.backend=torch"),
        ("qwen3_vl_moe", {"model": {"lora": {}}}, "model.lora with .* is a qwen3_vl_moe, .* leave model.lora out, or"),
    ],
)
def test_what_it_cannot_run_is_refused(family: str, backend: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(tiny(family), tmp_path)
    with pytest.raises(ConfigError, match=message), megatron_policy(folder, **backend):
        pass


def test_sizes_that_do_not_divide_the_model_are_refused() -> None:
    text = tiny(FAMILY, num_layers=3, num_kv_heads=1).network.config.text_config
    for setting, part in (("tensor_parallel_size", "key-value heads"), ("pipeline_parallel_size", "layers")):
        with pytest.raises(ConfigError, match=rf"{setting}=2 does not divide the model's \d {part}; set it to a div"):
            check_division(FAMILY, text, MegatronBackend.model_validate({setting: 2}))
    mixture = tiny("qwen3_vl_moe").network.config.text_config
    with pytest.raises(ConfigError, match=r"expert_parallel_size=3 does not divide the model's 4 experts"):
        check_division("qwen3_vl_moe", mixture, MegatronBackend(expert_parallel_size=3))


@pytest.mark.parametrize(
    ("family", "backend", "message"),
    [
        (FAMILY, {"expert_parallel_size": 2}, r"expert_parallel_size=2, but a qwen3_vl has no experts; set it to 1"),
        ("qwen3_vl_moe", {"tensor_parallel_size": 2, "expert_parallel_size": 2}, "set .*sequence_parallel=true"),
        ("qwen3_vl_moe", {"tensor_parallel_size": 2, "sequence_parallel": True}, "expert_parallel_size to a mult"),
    ],
)
def test_experts_go_with_the_tensors(family: str, backend: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_experts(family, MegatronBackend.model_validate(backend))
