"""Waits of the host for a GPU, in a pass and in calls of a policy, on the meta device (`tests.meta_device`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm
from fovea.config.model import Model, TinyModel
from fovea.config.sections import Warmup
from fovea.models.activation_tape import Tape
from fovea.models.decoder import decoder_shape
from fovea.models.heads import ValueHead
from fovea.models.policy_network import PolicyNetwork
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.shared_prefix.attention import fastest_kernel, heads_of
from fovea.models.trainable import choose_trainable, trainable_parameters, value_parameters
from fovea.models.transfer import to_device
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.samples import with_old_logprobs, with_values
from fovea.train.adamw import AdamWSettings
from fovea.train.base import Needs, SftExample
from fovea.train.loss import Measured, PassResult
from fovea.train.microbatches import MicrobatchLimit, in_batch_order
from fovea.train.packing import MicroBatch
from fovea.train.ranks import ALONE
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.passes import Reuse, Scorer, ValueFunction, ValueModel, policy_pass
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from tests.meta_device import META, NoPageableCopies, PretendedDevice
from tests.policies import PPO, make_batch, policy_on, train_settings, with_rewards
from tests.tiny_models import DENSE_FAMILIES, tiny, tower_passes


def vlm_on_meta(family: str, how: Recompute = "none", cache: FeatureCache | None = None, **model: object) -> VLM:
    parts = tiny(family)
    choose_trainable(parts.network, Model(tiny=TinyModel(), **model), seed=0)  # type: ignore[arg-type]
    recompute_activations(parts.network, how)
    vlm: VLM = VLM(parts.network.bfloat16(), parts.processor.banned_ids, feature_cache=cache).to(META)
    return vlm.train()


def passes_of(
    vlm: PolicyNetwork, batch: Batch, logits_mib: float = 512.0, **algorithm: object
) -> tuple[Scorer, Algorithm, Sequence[MicroBatch]]:
    train = train_settings(enable_dynamic_batch_size=False, backend={"logits_mib": logits_mib})
    scorer = Scorer(vlm, train, 0.9, ALONE, MicrobatchLimit(train, ALONE))
    settings = Algorithm.model_validate({"entropy_coef": 0.01, **algorithm})
    return scorer, settings, scorer.batcher.micro_batches(batch.groups)


def run(scorer: Scorer, algorithm: Algorithm, micros: Sequence[MicroBatch]) -> list[Measured]:
    with NoPageableCopies():
        return [policy_pass(scorer, micro, micro.row, algorithm, 1.0) for micro in micros]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_no_pass_reads_the_device(family: str, how: Recompute) -> None:
    vlm = vlm_on_meta(family, how)
    scorer, algorithm, micros = passes_of(vlm, make_batch(tiny(family)))
    assert len(micros) > 1
    assert any(micro.row.images for micro in micros)
    run(scorer, algorithm, micros)
    assert all(x.grad is not None and x.grad.device == META for x in vlm.network.model.visual.parameters())


@pytest.mark.parametrize("loss", ["gspo", "cispo", "sapo"])
def test_no_loss_reads_the_device(loss: str) -> None:
    run(*passes_of(vlm_on_meta("qwen3_vl"), make_batch(tiny("qwen3_vl")), loss={"name": loss}))


@pytest.mark.parametrize("old", ["trainer", "engine"])
def test_no_head_in_chunks_reads_the_device(old: str) -> None:
    """Neither where gradients are precomputed, whose check is the device's, nor where logits are made twice."""
    batch = make_batch(tiny("qwen3_vl"))
    if old == "engine":
        batch = with_old_logprobs(batch, [sample.rollout_logprobs_T for sample in batch.samples])
    for loss in ("clip", "gspo"):
        run(*passes_of(vlm_on_meta("qwen3_vl"), batch, logits_mib=0.005, loss={"name": loss}))


def test_neither_does_a_graph_of_the_rollout() -> None:
    """The pass of the tower, rows with leaves in place of its features, and the backward pass through it."""
    vlm, batch = vlm_on_meta("qwen3_vl", "full").eval(), make_batch(tiny("qwen3_vl"))
    with NoPageableCopies(), torch.no_grad():
        graph = vlm.image_graph([image for group in batch.groups for image in group.prompt.images])
    leaves = {key: features.map(lambda x: x.detach().requires_grad_()) for key, features in graph.items()}
    reuse = Reuse(graph, leaves, Tape([], 0, vlm.dtype))
    scorer, algorithm, micros = passes_of(vlm.train(), batch)
    run(scorer, algorithm, [replace(micro, row=reuse.row(micro)) for micro in micros])
    tower = list(vlm.network.model.visual.parameters())
    assert all(x.grad is None for x in tower)
    reuse.finish()
    assert all(x.grad is not None for x in tower)


def test_neither_do_experts_nor_adapters_on_a_frozen_tower() -> None:
    run(*passes_of(vlm_on_meta("qwen3_vl_moe"), make_batch(tiny("qwen3_vl_moe"))))
    frozen = {"lora": {"rank": 4}, "freeze_vision_tower": True}
    vlm = vlm_on_meta("qwen3_vl", cache=FeatureCache(2**30), **frozen)
    patches = tower_passes(vlm)
    scorer, algorithm, micros = passes_of(vlm, make_batch(tiny("qwen3_vl")))
    run(scorer, algorithm, micros)
    of_rows = [sum(len(x.tensors["pixel_values"]) for x in micro.row.images) for micro in micros]
    assert patches == [number for number in of_rows if number], "all images of a row in one pass, unlike on a CPU"


def test_it_ran_by_the_kernels_of_a_gpu() -> None:
    vlm = vlm_on_meta("qwen3_vl")
    assert fastest_kernel(heads_of(decoder_shape(vlm.text_config), vlm.device, vlm.dtype)) == "varlen"
    assert vlm.slow_kernels() == []


def test_the_device_notices_what_is_read() -> None:
    """The tests above could not fail otherwise."""
    number = torch.zeros(3, device=META)
    for read in (lambda x: x.sum().item(), Tensor.tolist, Tensor.nonzero, Tensor.unique):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(number)
    with NoPageableCopies():
        to_device(torch.zeros(3), META)
        for copy in (lambda: torch.tensor([1, 2], device=META), lambda: torch.zeros(3).to(META)):
            with pytest.raises(AssertionError):
                copy()


def test_results_of_all_micro_batches_are_read_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tiny("qwen3_vl")
    batch = make_batch(parts)
    scorer, algorithm, micros = passes_of(VLM(parts.network, parts.processor.banned_ids), batch)
    measured = run(scorer, algorithm, micros)
    copies: list[str] = []

    def counted(name: str, read: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
        def wrapped(tensor: Tensor) -> object:
            copies.append(name)
            return read(tensor)

        return wrapped

    for name in ("cpu", "tolist"):
        monkeypatch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
    done = PassResult.of(measured, ALONE)
    in_batch_order(done.logprobs, batch.groups, ALONE)
    assert len(micros) > 1
    assert copies == ["tolist", "cpu"], "one of all sums, one of all log-probs"


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
    pairs = [SftExample(prompt=g.prompt, answer_ids=g.samples[0].token_ids_T.tolist()) for g in batch.groups]
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
