"""An update that takes over its rollout's work against one that does not: the same gradient, and no work twice."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea.config.algorithm import Algorithm
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models import vlm as vlm_module
from fovea.models.activation_tape import Tape
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.trainable import choose_trainable
from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.tuning import Tuning
from fovea.samples import with_old_logprobs
from fovea.train.torch.policy import TorchPolicy
from fovea.train.update_metrics import ActivationMeter
from fovea.types import Completion, Request, Sampling
from fovea.wiring.engine import make_tape
from fovea_gym.utils.event_loop import wait_for
from tests.meta_device import META
from tests.policies import micro_batcher
from tests.reference import largest_relative_difference
from tests.rollout.drawing import generate
from tests.saved import save_policy
from tests.tiny_models import DENSE_FAMILIES, FAMILIES, mixed_prompts, tiny, tower_passes
from tests.train.recording_pair import (
    FROZEN,
    GRADIENT_TOLERANCE,
    LORA,
    TRAINED,
    Pair,
    batch_of,
    gradients_of_steps,
    reusing_and_plain,
)

DEEP_TOWER = {"vision_depth": 8}
"""Of which blocks keep most."""


@pytest.mark.parametrize("max_tokens", [10_000, 85])
@pytest.mark.parametrize("settings", [TRAINED, FROZEN, LORA], ids=["trained", "frozen", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_a_plain_update(family: str, settings: Model, max_tokens: int) -> None:
    pairs = reusing_and_plain(lambda: Pair(tiny(family), settings, max_tokens_per_microbatch=max_tokens))
    for pair, traces in zip(pairs, (True, False), strict=True):
        reuses = traces and pair.tape.holds_linears
        assert reuses == (traces and family in DENSE_FAMILIES), "experts compute their outputs anew"
        assert pair.metrics["reused_frac"] == float(reuses)
        assert pair.metrics["reused_images"] == (3 if traces and settings.trains_vision else 0)
        assert ("mismatch/abs" in pair.metrics) != reuses, "what was looked up was not compared"


def test_completions_that_end_early_and_wait_in_line_are_recorded_right() -> None:
    """Rows that move when others end, and prompts that are prefilled beside running rows."""

    def drawn(pair: Pair) -> list[Sequence[Completion]]:
        pair.prompts = pair.prompts * 3
        groups = pair.rollout(max_new_tokens=24, n=2, stop=("e", "a"))
        assert len({len(completion.token_ids_T) for group in groups for completion in group}) > 4
        return groups

    pairs = reusing_and_plain(lambda: Pair(tiny("qwen3_vl"), engine={"max_batch_tokens": 160}), drawn)
    assert [pair.metrics["reused_frac"] for pair in pairs] == [1, 0]


def test_no_linear_layer_of_the_decoder_runs_forward_again_and_no_image_is_encoded_again() -> None:
    operations = []
    for traces in (True, False):
        pair = Pair(tiny("qwen3_vl"))
        batch = batch_of(pair.prompts, pair.rollout(), traces=traces)
        with FlopCounterMode(display=False) as counter:
            pair.policy.update(batch)
        operations.append(counter.get_total_flops())
    layers = pair.vlm.network.get_submodule("model.language_model.layers")
    tokens = sum(p.num_tokens for p in pair.prompts) + sum(len(s.token_ids_T) - 1 for s in batch.samples)
    # behind the attention of the last layer the prompts' tokens are left out, but for the last of each
    unread, linear = sum(p.num_tokens - 1 for p in pair.prompts), 0
    for name, module in layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            is_behind = int(name[0]) == len(layers) - 1 and name[-6:] not in ("q_proj", "k_proj", "v_proj")
            linear += 2 * (tokens - unread * is_behind) * module.weight.numel()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        pair.vlm.encode(list({image.key: image for prompt in pair.prompts for image in prompt.images}.values()))
    assert operations[1] - operations[0] == linear + counter.get_total_flops()


def test_only_the_first_step_after_a_rollout_may_reuse_it() -> None:
    pair = Pair(tiny("qwen3_vl"))
    batch = batch_of(pair.prompts, pair.rollout())
    assert pair.policy.update(batch)["reused_frac"] == 1
    assert pair.policy.update(batch)["reused_frac"] == 0, "the weights have moved"
    wait_for(pair.weight_sync.sync(1))
    assert pair.policy.update(batch)["reused_frac"] == 0, "the tape has been overwritten"


@pytest.mark.parametrize("minibatches", [1, 2])
def test_what_one_of_several_steps_reuses_changes_none_of_them(minibatches: int) -> None:
    """The first minibatch of the first epoch takes over everything, the later ones and the next epoch nothing."""
    gradients: list[list[dict[str, torch.Tensor]]] = []
    for traces in (True, False):
        pair = Pair(tiny("qwen3_vl"), algorithm=Algorithm(ppo_epochs=2, minibatches=minibatches), learning_rate=0.1)
        pair.prompts = pair.prompts * 2
        batch = batch_of(pair.prompts, pair.rollout(max_new_tokens=16), traces=traces)
        if minibatches > 1:
            batch = with_old_logprobs(batch, pair.policy.logprobs(batch))
        gradients.append(gradients_of_steps(pair, batch))
        first = batch.groups[: len(batch.groups) // minibatches]
        actions = sum(len(sample.token_ids_T) for group in first for sample in group.samples)
        assert pair.metrics["reused_frac"] == traces * actions / pair.metrics["actions_trained"]
        assert pair.metrics["reused_images"] == traces * 3
        assert pair.metrics["clip_frac/low"] + pair.metrics["clip_frac/high"] > 0, "old log-probs count"
    reused, plain = gradients
    assert len(reused) == len(plain) == 2 * minibatches
    for step in range(2 * minibatches):
        assert largest_relative_difference(plain[step], reused[step]) < GRADIENT_TOLERANCE, f"step {step}"


CHANGES: dict[str, Callable[[TorchPolicy, Path], None]] = {
    "snapshot": lambda policy, _: policy.snapshot_reference(),
    "load": lambda policy, folder: policy.load(folder),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_changes_of_the_weights_end_it_too(change: Callable[..., None], tmp_path: Path) -> None:
    pair = Pair(tiny("qwen3_vl"))
    save_policy(pair.policy, tmp_path)
    batch = batch_of(pair.prompts, pair.rollout())
    change(pair.policy, tmp_path)
    assert pair.policy.update(batch)["reused_frac"] == 0


def test_some_updates_are_plain_so_that_the_sampler_stays_checked() -> None:
    pair = Pair(tiny("qwen3_vl"), plain_update_every_steps=3)
    fractions = []
    for version in range(6):
        wait_for(pair.weight_sync.sync(version))
        fractions.append(pair.policy.update(batch_of(pair.prompts, pair.rollout()))["reused_frac"])
    assert fractions == [1, 1, 0, 1, 1, 0], "steps 1 to 6"


def test_what_does_not_fit_is_computed_again() -> None:
    parts = tiny("qwen3_vl")
    graph_bytes = VLM(parts.network, parts.processor.banned_ids).graph_bytes(
        [image for prompt in mixed_prompts(parts) for image in prompt.images]
    )
    for max_bytes, images in ((graph_bytes + 1000, 3), (graph_bytes - 1, 0)):
        pair = Pair(tiny("qwen3_vl"), max_bytes=max_bytes)
        metrics = pair.policy.update(batch_of(pair.prompts, pair.rollout()))
        assert (metrics["reused_frac"], metrics["reused_images"]) == (0, images)


def test_evaluation_beside_it_records_nothing() -> None:
    pair = Pair(tiny("qwen3_vl"))
    sampling = Sampling(max_new_tokens=5, temperature=0)
    ((completion,),) = generate(pair.engine, pair.prompts[:1], [sampling], 1)
    assert pair.tape.trace(completion.id) is None
    assert pair.policy.update(batch_of(pair.prompts, pair.rollout()))["reused_frac"] == 1, "it was over by then"


def test_a_request_that_asks_for_nothing_ends_the_recording_of_those_beside_it() -> None:
    async def mixed(pair: Pair) -> list[Sequence[Completion]]:
        sampling = Sampling(max_new_tokens=8, temperature=0.9, seed=1)
        asked = enumerate(zip(pair.prompts, (True, False, True), strict=True))
        requests = [Request(id=str(i), prompt=p, sampling=sampling, n=2, for_update=u) for i, (p, u) in asked]
        return await asyncio.gather(*map(pair.engine.generate, requests))

    pairs = reusing_and_plain(lambda: Pair(tiny("qwen3_vl")), lambda pair: wait_for(mixed(pair)))
    assert [pair.metrics["reused_frac"] for pair in pairs] == [0, 0]


def test_few_images_with_signal_are_encoded_again() -> None:
    """A backward pass through the graph of all images would cost more."""
    encoded, gradients = [], []
    for kept, traces in ((1, True), (1, False), (3, True)):
        pair = Pair(tiny("qwen3_vl"), linears=False)
        batch = batch_of(pair.prompts, pair.rollout(), traces=traces)
        patches = tower_passes(pair.vlm)
        gradients.append(pair.gradient(replace(batch, groups=batch.groups[:kept])))
        encoded.append(len(patches))
    assert encoded == [1, 1, 0]
    assert largest_relative_difference(gradients[1], gradients[0]) < GRADIENT_TOLERANCE


def test_outputs_of_packed_weights_serve_as_well() -> None:
    """Wide enough for decoding with packed weights, which copies its outputs to the tape."""
    pairs = reusing_and_plain(lambda: Pair(tiny("qwen2_5_vl", hidden_size=256, num_heads=4, num_kv_heads=2)))
    assert [pair.metrics["reused_frac"] for pair in pairs] == [1, 0]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
@pytest.mark.parametrize("how", ["none", "full"])
def test_a_trained_tower_runs_once_for_rollout_and_update(how: Recompute, family: str) -> None:
    """As on a GPU: over pages, several steps between syncs, the graph alone."""
    found, limit = [], {"max_tokens_per_microbatch": 85}
    for traces in (True, False):
        parts = tiny(family)
        recompute_activations(parts.network, how)
        tuning = Tuning(cache="paged", decode_steps_per_wait=3)
        pair = Pair(parts, linears=False, engine={"tuning": tuning}, **limit)
        patches = tower_passes(pair.vlm)
        batch = batch_of(pair.prompts, pair.rollout(), traces=traces)
        assert len(patches) == 1, "all prompts are admitted at once"
        micros = micro_batcher(parts, **limit).micro_batches(batch.groups)
        of_rows = [sum(len(x.tensors["pixel_values"]) for x in micro.row.images) for micro in micros]
        assert len([number for number in of_rows if number]) > 1
        found.append(pair.gradient(batch))
        assert patches[1:] == ([] if traces else [number for number in of_rows if number])
        assert pair.metrics["reused_images"] == (3 if traces else 0)
    assert largest_relative_difference(found[1], found[0]) < GRADIENT_TOLERANCE


def test_a_graph_of_many_images_is_made_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tiny("qwen3_vl")
    vlm = VLM(parts.network, ()).eval()
    images = {image.key: image for prompt in mixed_prompts(parts) for image in prompt.images}
    whole, patches = vlm.image_graph(list(images.values())), tower_passes(vlm)
    monkeypatch.setattr(vlm_module, "PASS_PATCHES", 1)
    single = vlm.image_graph(list(images.values()))
    assert len(patches) == len(images) == 3
    assert not vlm.network.get_submodule("model.visual").training, "it is that of a rollout again"
    for key, features in whole.items():
        torch.testing.assert_close(single[key].embeds_VD, features.embeds_VD)


@pytest.mark.parametrize("depth", [2, 8, 24])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen behind a projector"])
@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_a_graph_keeps_no_more_than_is_estimated(family: str, how: Recompute, frozen: bool, depth: int) -> None:
    pair = Pair(tiny(family, vision_depth=depth), linears=False)
    model = Model(path="x", freeze_vision_tower=frozen, freeze_projector=False)
    choose_trainable(pair.vlm.network, model, seed=0)
    recompute_activations(pair.vlm.network, how)
    images = [image for prompt in pair.prompts for image in prompt.images]
    meter = ActivationMeter(pair.vlm.network)
    with meter(1):
        pair.vlm.image_graph(images)
    assert 0.4 * pair.vlm.graph_bytes(images) < meter.num_bytes <= pair.vlm.graph_bytes(images)


def test_a_gpu_keeps_the_graph_of_a_trained_tower_alone() -> None:
    def tape_on(device: torch.device, **settings: object) -> Tape | None:
        sizes = {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 2}
        frozen = {"freeze_vision_tower": settings.pop("frozen", False)}
        config = Config.model_validate({"model": {"tiny": sizes, **frozen}, "train": settings})
        network = tiny("qwen3_vl", **sizes).network  # type: ignore[arg-type]
        choose_trainable(network, config.model, seed=0)
        return make_tape(config, VLM(network, ()).to(device))

    on_cpu, on_gpu = tape_on(torch.device("cpu")), tape_on(META)
    recomputing = tape_on(torch.device("cpu"), gradient_checkpointing="full")
    assert [tape.holds_linears for tape in (on_cpu, on_gpu, recomputing)] == [True, False, False]
    assert tape_on(META, frozen=True) is tape_on(META, gradient_checkpointing="selective") is None


@pytest.mark.parametrize("kept", ["all", "few", "plain"])
def test_no_graph_of_the_tower_outlives_its_update(kept: str) -> None:
    """True if it was gone through or not: the next rollout makes one of its own."""
    pair = Pair(tiny("qwen3_vl"), linears=False, plain_update_every_steps=1 if kept == "plain" else 1000)
    batch = batch_of(pair.prompts, pair.rollout())
    trace = pair.tape.trace(batch.groups[0].samples[0].completion_ids[0])
    alive = [weakref.ref(features.embeds_VD) for features in pair.tape.graph(trace.graph_number).values()]
    assert all(reference() is not None for reference in alive)
    pair.policy.update(replace(batch, groups=batch.groups[:1]) if kept == "few" else batch)
    assert not any(reference() is not None for reference in alive)


@pytest.mark.parametrize("tuning", [Tuning(int8_decoding=True), Tuning(decode_steps_per_wait=3), Tuning(cache="paged")])
def test_a_tape_that_would_be_wrong_is_refused(tuning: Tuning) -> None:
    vlm = VLM(tiny("qwen3_vl").network, ())
    tape = Tape(vlm.linear_widths, 2**20, torch.float32)
    with pytest.raises(ValueError, match="a tape of linear outputs needs exact decoding over the dense cache"):
        EmbeddedEngine(vlm, tiny("qwen3_vl"), max_batch_tokens=1000, tape=tape, tuning=tuning)
