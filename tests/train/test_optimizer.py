"""AdamW's settings, steps and state, and sums of bfloat16 gradients over many micro-batches: those of float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from fovea.config.model import Model, TinyModel
from fovea.errors import TrainError
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable, trainable_parameters
from fovea.train.adamw import AdamWSettings
from fovea.train.ranks import ALONE
from fovea.train.torch import optimizer as optimizer_module
from fovea.train.torch.checkpoint import StagedShards
from fovea.train.torch.optimizer import MasterWeights, Optimizer
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from tests.host_bytes import HostBytes
from tests.meta_device import META, PretendedDevice
from tests.policies import (
    APART,
    flat_weights,
    gradients_and_metrics,
    make_batch,
    make_policy,
    many_groups,
    named,
    train_settings,
    update_gradients,
    weights_of,
    with_advantage,
)
from tests.reference import largest_relative_difference
from tests.saved import save_policy
from tests.tiny_models import tiny


def optimizer_of(parameters: dict[str, nn.Parameter], **train: object) -> Optimizer:
    settings = train_settings(lr_warmup_steps=0, **train)
    return Optimizer(parameters, AdamWSettings.of_run(settings, max_steps=10), on_host=settings.backend.cpu_offload)


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


def save(optimizer: Optimizer, folder: Path) -> None:
    for name, tensors in optimizer.tensors("policy").items():
        StagedShards.of(tensors, ALONE).write(folder / name, 0)


def values(optimizer: Optimizer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in optimizer.parameters.values()]


def test_what_decays_is_what_transformers_trainer_decays(parts: TinyParts) -> None:
    """All but norms and biases, by its lists of names and classes; norm1, norm2 and ln_q are on neither list.

    Nor is A_log, the vector of a delta net's decay rates, which Mamba's authors leave out of weight decay.
    """
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
    assert all(name.endswith(("norm1.weight", "norm2.weight", "ln_q.weight", "A_log")) for name in theirs - decayed)
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


def test_masters_on_the_host_take_the_same_steps(tmp_path: Path) -> None:
    """Copies even of float32 parameters; saved, loaded and gone on with."""
    plain, offloaded = optimizer_of(two_parameters()), optimizer_of(two_parameters(), backend={"cpu_offload": True})
    for number in range(3):
        step(plain, number)
        step(offloaded, number)
    save(offloaded, tmp_path)
    resumed = optimizer_of(two_parameters(), backend={"cpu_offload": True})
    resumed.load(tmp_path, "policy")
    for optimizer in (plain, resumed):
        step(optimizer, 3)
    for one, other, masters in zip(values(plain), values(resumed), resumed.masters.by_name.values(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(masters, one)
    trained = {x.data_ptr() for x in resumed.parameters.values()}
    assert trained.isdisjoint(x.data_ptr() for x in resumed.masters.by_name.values())


BUCKET_BYTES = 2**10


def odd_parameters(dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, nn.Parameter]:
    """Parameters that share a bucket, fill one, and need several of BUCKET_BYTES, with rows of odd lengths."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((37, 13), (5,), (), (1000,), (3, 17, 19), (7, 2), (640,), (2, 2))
    return {str(shape): nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes}


def optimizer_at_rates(parameters: dict[str, nn.Parameter], **train: object) -> Optimizer:
    """An optimizer with four parameter groups: matrices and others, at two learning rates."""
    settings = train_settings(learning_rate=0.1, weight_decay=0.5, max_grad_norm=1.0, **train)
    ratios = dict.fromkeys(list(parameters)[::2], 3.0)
    adamw = AdamWSettings.of_run(settings, max_steps=10)
    return Optimizer(parameters, adamw, on_host=settings.backend.cpu_offload, rate_ratios=ratios)


def step_without_some(optimizer: Optimizer, number: int) -> None:
    """A clipped step in which a parameter has no gradient, one more each time."""
    optimizer.zero_grad()
    for index, parameter in enumerate(optimizer.parameters.values()):
        if index >= number:
            generator = torch.Generator().manual_seed(10 * number + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.set_rate(number)
    assert optimizer.clip() > 1
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_by_buckets_is_the_whole_step_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, with parameter groups, parameters without a gradient, and a resumed run with other buckets."""
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", BUCKET_BYTES)
    offload = {"backend": {"cpu_offload": True}}
    whole, by_buckets = optimizer_at_rates(odd_parameters(dtype)), optimizer_at_rates(odd_parameters(dtype), **offload)
    for number in range(3):
        step_without_some(whole, number)
        step_without_some(by_buckets, number)
        assert all(parameter.grad is None for parameter in by_buckets.parameters.values())
    save(by_buckets, tmp_path)
    resumed = optimizer_at_rates(odd_parameters(dtype), **offload)
    resumed.load(tmp_path, "policy")
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", 3 * BUCKET_BYTES)
    for optimizer in (whole, resumed):
        step_without_some(optimizer, 3)
    assert all(torch.equal(one, other) for one, other in zip(values(whole), values(resumed), strict=True))
    expected, found = (
        {f"{folder}/{name}": x for folder, each in optimizer.tensors("policy").items() for name, x in each.items()}
        for optimizer in (whole, resumed)
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=["full", "LoRA"])
def test_updates_with_masters_on_the_host_are_those_without(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with three learning rates; one update is skipped, and the last one is of a resumed run."""
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", 2**13)
    found = []
    for offload in (False, True):
        folder = tmp_path / str(offload)
        folder.mkdir()
        for is_resumed in (False, True):
            parts = tiny("qwen3_vl")
            choose_trainable(parts.network, Model(tiny=TinyModel(), **model), seed=0)
            backend = {"cpu_offload": offload}
            policy = make_policy(parts, max_grad_norm=0.01, lr_warmup_steps=0, backend=backend, **APART)
            batch = named(make_batch(parts))
            if is_resumed:
                policy.load(folder)
            else:
                policy.update(batch)
                assert policy.update(with_advantage(batch, 1, np.nan))["updates_skipped"] == 1
                save_policy(policy, folder)
        assert policy.update(batch)["updates_skipped"] == 0
        found.append({name: weight.clone() for name, weight in weights_of(policy).items()})
    whole, by_buckets = found
    assert whole.keys() == by_buckets.keys()
    assert all(torch.equal(whole[name], by_buckets[name]) for name in whole)


def test_the_host_holds_two_buckets_of_gradients_and_waits_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all gradients were in host memory before the first weight was updated: 4 bytes for each."""
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", BUCKET_BYTES, raising=False)
    parameters = odd_parameters(torch.bfloat16, META)
    del parameters["(3, 17, 19)"]  # has too few rows to be divided
    with PretendedDevice() as made:
        optimizer = optimizer_at_rates(parameters, backend={"cpu_offload": True})
        made.waits.clear()
    optimizer.make_moments()
    optimizer.set_rate(0)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    num_bytes = sum(4 * parameter.numel() for parameter in parameters.values())
    with HostBytes() as host, PretendedDevice() as device:
        optimizer.step()
    numbers_of_steps = 4 * len(parameters)
    assert host.most <= 2 * BUCKET_BYTES + numbers_of_steps < num_bytes
    assert num_bytes / BUCKET_BYTES <= sum(device.waits.values()) <= 1.5 * num_bytes / BUCKET_BYTES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_masters_and_moments_are_the_hosts() -> None:
    parameters = {name: nn.Parameter(x.detach().cuda()) for name, x in two_parameters().items()}
    optimizer = optimizer_of(parameters, backend={"cpu_offload": True})
    optimizer.zero_grad()
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.set_rate(0)
    optimizer.step()
    state = [x for of_parameter in optimizer.adamw.state.values() for x in of_parameter.values()]
    assert {x.device.type for x in (*optimizer.masters.by_name.values(), *state)} == {"cpu"}
    assert {x.device.type for x in parameters.values()} == {"cuda"}


def test_settings_of_the_run_outlive_a_checkpoint(tmp_path: Path) -> None:
    """A resumed run has the moments of the checkpoint, and rate, decay and epsilon of its own settings."""
    given: dict[str, object] = {"learning_rate": 0.1, "weight_decay": 0.5}
    changed: dict[str, object] = {"learning_rate": 0.01, "weight_decay": 0.1, "adam_eps": 1e-3, "betas": (0.5, 0.6)}
    first = optimizer_of(two_parameters(), **given)
    step(first, 0)
    save(first, tmp_path)
    resumed, by_hand = optimizer_of(two_parameters(), **changed), optimizer_of(two_parameters(), **given)
    resumed.load(tmp_path, "policy")
    by_hand.load(tmp_path, "policy")
    for group in by_hand.adamw.param_groups:
        group |= {"lr": 0.01, "eps": 1e-3, "betas": (0.5, 0.6)}
        group["weight_decay"] = 0.1 if group["weight_decay"] else 0.0
    step(resumed, 1)
    by_hand.zero_grad()
    for index, parameter in enumerate(by_hand.parameters.values()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 + index))
    by_hand.step()
    for one, other in zip(values(resumed), values(by_hand), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_moments_of_another_model_are_no_silent_mix_up(tmp_path: Path) -> None:
    """They are saved by the names of their parameters, in whatever groups these are."""
    first = optimizer_of(two_parameters())
    step(first, 0)
    save(first, tmp_path)
    (tmp_path / "policy_optimizer" / "rank-00000.safetensors").unlink()
    other = {name.replace("weight", "other"): x for name, x in two_parameters().items()}
    moments = optimizer_of(other)
    step(moments, 0)
    tensors = moments.tensors("policy")["policy_optimizer"]
    StagedShards.of(tensors, ALONE).write(tmp_path / "policy_optimizer", 0)
    with pytest.raises(TrainError, match=r"exp_avg/other is of another model|step/other is of another model"):
        optimizer_of(two_parameters()).load(tmp_path, "policy")


def test_moments_that_are_made_before_the_first_step_are_those_of_torch() -> None:
    """Bit for bit, and of the same kinds: a torch with other state would make its own."""
    plain, early = (optimizer_of(two_parameters()) for _ in range(2))
    early.make_moments()
    for number in range(2):
        step(plain, number)
        step(early, number)
        early.make_moments()
    assert all(torch.equal(a, b) for a, b in zip(values(plain), values(early), strict=True))
    made, own = (optimizer.tensors("policy")["policy_optimizer"] for optimizer in (early, plain))
    assert list(made) == list(own)
    for name, tensor in own.items():
        assert torch.equal(made[name], tensor)
        assert made[name].dtype == tensor.dtype


NUM_GROUPS = 66
"""And as many micro-batches."""
FLOAT32_ROUNDING = 1e-5


def bfloat16_policy(**train: object) -> TorchPolicy:
    parts = tiny("qwen3_vl")
    parts.network.bfloat16()
    return make_policy(parts, temperature=1.0, enable_dynamic_batch_size=False, lr_warmup_steps=0, **train)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return many_groups(NUM_GROUPS)


@pytest.fixture(scope="module")
def expected(batch: Batch) -> dict[str, torch.Tensor]:
    """The gradients of each micro-batch only, in updates that move no weight, added up in float32."""
    total: dict[str, torch.Tensor] = {}
    policy = bfloat16_policy(learning_rate=1e-60)
    before = flat_weights(policy)
    for group in batch.groups:
        for name, gradient in update_gradients(policy, Batch(groups=(group,))).items():
            total[name] = total.get(name, 0) + gradient
    assert torch.equal(flat_weights(policy), before)
    return total


def test_many_micro_batches_add_up_as_in_float32(batch: Batch, expected: dict[str, torch.Tensor]) -> None:
    found = update_gradients(bfloat16_policy(), batch)
    assert expected.keys() == found.keys()
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert largest_relative_difference(expected, found) < FLOAT32_ROUNDING


def test_the_norm_and_the_clip_are_of_the_float32_sum(batch: Batch, expected: dict[str, torch.Tensor]) -> None:
    norm = torch.cat([x.flatten() for x in expected.values()]).norm()
    found, metrics = gradients_and_metrics(bfloat16_policy(max_grad_norm=1e-3), batch)
    assert torch.cat([x.flatten() for x in found.values()]).norm() == pytest.approx(1e-3, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_there_is_one_gradient_of_each_weight(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 one, handed from the parameter to its master: no second copy."""
    taken, take = list[MasterWeights](), MasterWeights.take_gradients
    policy = bfloat16_policy()
    parameters = trainable_parameters(policy.vlm)

    def checked(masters: MasterWeights) -> None:
        before = {name: x.grad.data_ptr() for name, x in parameters.items() if x.grad is not None}
        take(masters)
        assert {name: x.grad.data_ptr() for name, x in masters.by_name.items() if x.grad is not None} == before
        assert all(parameter.grad is None for parameter in parameters.values())
        taken.append(masters)

    monkeypatch.setattr(MasterWeights, "take_gradients", checked)
    policy.update(Batch(groups=batch.groups[:2]))
    assert len(taken) == 1
