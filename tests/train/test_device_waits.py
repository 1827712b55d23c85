"""How often the host waits for a GPU in whole calls of a policy, counted on the meta device (`tests.meta_device`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm
from fovea.config.model import Model, TinyModel
from fovea.config.sections import Warmup
from fovea.models.heads import ValueHead
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.trainable import choose_trainable, trainable_parameters, value_parameters
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.samples import with_old_logprobs, with_values
from fovea.train.adamw import AdamWSettings
from fovea.train.base import Needs, SftExample
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.passes import ValueFunction, ValueModel
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from tests.meta_device import META, PretendedDevice
from tests.policies import make_batch, policy_on, train_settings
from tests.tiny_models import tiny
from tests.train.ppo_policies import PPO, with_rewards

FAMILY = "qwen3_vl"
FROZEN_LORA = {"lora": {"rank": 4}, "freeze_vision_tower": True}


@pytest.fixture(autouse=True)
def _fused_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused AdamW has its shapes on the meta device, and torch a list of devices without that."""
    module = import_module("torch.optim.optimizer")
    devices = module._get_fused_kernels_supported_devices()
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: [*devices, META.type])


def policy_on_meta(
    algorithm: Algorithm | None = None, how: Recompute = "full", warmup: Warmup | None = None, **model: object
) -> TorchPolicy:
    parts = tiny(FAMILY)
    choose_trainable(parts.network, Model(tiny=TinyModel(), **model), seed=0)  # type: ignore[arg-type]
    recompute_activations(parts.network, how)
    cache = FeatureCache(2**30) if model.get("freeze_vision_tower") else None
    vlm: VLM = VLM(parts.network.bfloat16(), parts.processor.banned_ids, feature_cache=cache).to(META)
    with PretendedDevice():  # hashes of frozen weights are read
        return policy_on(vlm, train_settings(gradient_checkpointing=how), algorithm, warmup=warmup)


def waits(call: Callable[[], object]) -> Counter[str]:
    """Waits of the host in a call, by the line that waits."""
    with PretendedDevice() as device:
        call()
    return device.waits


def ppo_on_meta(*, separate: bool) -> TorchPolicy:
    parts = tiny(FAMILY)
    head = None if separate else ValueHead(parts.network.config.text_config.hidden_size, detach_trunk=False)
    vlm: VLM = VLM(parts.network.bfloat16(), parts.processor.banned_ids, value_head=head).to(META)
    model = ValueModel(deepcopy(vlm)).to(META) if separate else None
    train = train_settings(gradient_checkpointing="full")
    values = value_parameters(vlm) if model is None else trainable_parameters(model)
    optimizer = Optimizer(values, AdamWSettings.of_run(train, peak_rate=1e-2, max_steps=10))
    critic = ValueFunction(optimizer=optimizer, model=model)
    return policy_on(vlm, train, PPO, value_function=critic)


def scored_batch() -> Batch:
    batch = with_rewards(make_batch(tiny(FAMILY)))
    of_engine = [sample.rollout_logprobs_T for sample in batch.samples]
    return with_advantages(with_values(with_old_logprobs(batch, of_engine), of_engine), PPO, 0.0)[0]


@pytest.mark.parametrize("model", [{}, FROZEN_LORA], ids=["full", "LoRA on a frozen tower"])
def test_an_update_of_grpo_waits_three_times(model: dict[str, object]) -> None:
    policy, batch = policy_on_meta(**model), make_batch(tiny(FAMILY))
    first, second = waits(lambda: policy.update(batch)), waits(lambda: policy.update(batch))
    assert first == second
    assert sum(first.values()) == 3, "sums of the passes, the norm of the gradient, and log-probs"


def test_each_minibatch_waits_twice() -> None:
    policy = policy_on_meta(Algorithm(minibatches=3, ppo_epochs=2))
    found = waits(lambda: policy.update(scored_batch()))
    assert sum(found.values()) == 2 * 6, "sums of the passes, and the norm of the gradient"


@pytest.mark.parametrize("separate", [False, True], ids=["a head", "a separate critic"])
def test_an_update_of_ppo_waits_for_a_second_norm(separate: bool) -> None:
    policy = ppo_on_meta(separate=separate)
    scores = Needs(old_logprobs=True, values=True)
    assert sum(waits(lambda: policy.compute_logprobs(scored_batch(), scores)).values()) == 2, "log-probs, and values"
    assert sum(waits(lambda: policy.update(scored_batch())).values()) == 3, "sums of the passes, and two norms"


def test_scoring_waits_once_and_a_step_of_the_warm_up_once() -> None:
    policy, batch = policy_on_meta(warmup=Warmup()), make_batch(tiny(FAMILY))
    assert sum(waits(lambda: policy.compute_logprobs(batch, Needs(old_logprobs=True))).values()) == 1
    pairs = [
        SftExample(prompt=group.prompt, answer_ids=group.samples[0].token_ids_T.tolist()) for group in batch.groups
    ]
    for _ in range(2):
        assert sum(waits(lambda: policy.sft(pairs)).values()) == 1
    assert not waits(policy.snapshot_reference)


def test_a_checkpoint_waits_once_for_each_tensor_that_it_copies(tmp_path: Path) -> None:
    policy, batch = policy_on_meta(), make_batch(tiny(FAMILY))
    waits(lambda: policy.update(batch))
    found = waits(lambda: policy.save(tmp_path))
    policy.finish_save()
    weights = len(trainable_parameters(policy.vlm))
    assert sum(found.values()) == 4 * weights, "master weights, two moments, and the number of steps"


def test_the_pretended_device_notices_what_it_is_for() -> None:
    """The tests above could not fail otherwise."""
    on_device, on_host = torch.zeros(3, device=META), torch.zeros(3)
    reads = (Tensor.tolist, Tensor.cpu, lambda x: bool(x[0]), lambda x: x.sum().item(), on_host.copy_)
    for read in reads:
        assert sum(waits(lambda read=read: read(on_device)).values()) == 1
    mistakes = (
        on_device.nonzero,
        lambda: on_device + on_host,
        lambda: torch.where(on_device > 0, on_host, on_host),
        lambda: on_host.to(META),
        lambda: torch.tensor([1, 2], device=META),
    )
    for mistake in mistakes:
        with pytest.raises((AssertionError, RuntimeError)):
            waits(mistake)
