"""A training pass on a GPU makes the host wait for nothing: here on torch's meta device (`tests.meta_device`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fovea.config.algorithm import Algorithm
from fovea.config.model import Model, TinyModel
from fovea.models.activation_tape import Tape
from fovea.models.decoder import decoder_shape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.shared_prefix.attention import fastest_kernel, heads_of
from fovea.models.trainable import choose_trainable
from fovea.models.transfer import to_device
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.samples import with_old_logprobs
from fovea.train.loss import Measured, PassResult
from fovea.train.microbatches import MicrobatchLimit, in_batch_order
from fovea.train.packing import MicroBatch
from fovea.train.ranks import ALONE
from fovea.train.torch.passes import Reuse, Scorer, policy_pass
from fovea.types import Batch
from tests.meta_device import META, NoPageableCopies
from tests.policies import make_batch, train_settings
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
