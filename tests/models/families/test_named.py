"""Named families whose prompts transformers' processor makes: against that processor and transformers' forward."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.experts import Experts
from fovea.models.families.auto import AutoFamily
from fovea.models.families.hub_processor import load_hub_processor
from fovea.models.families.named import NAMED, NamedFamily
from fovea.models.plain import PlainVLM
from fovea.models.policy_network import PolicyNetwork
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.render import images_of
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.types import PromptImage
from fovea.wiring.run import build
from fovea_gym.errors import ConfigError
from fovea_tools.families.tiny import KINDS, save_tiny_kind
from gym_tests.images import from_array
from tests.hub_models import (
    CHATS,
    TOLERANCE,
    Loaded,
    assert_inputs_equal,
    assert_scored,
    moving_difference,
    needs_image_processors,
)
from tests.plain_runs import run_settings, train_and_export
from tests.reference import gradients, largest_relative_difference
from tests.rollout.drawing import generate, make_engine, plain_engine, same, seeded
from tests.rollout.two_turns import assert_drawn_and_scored_alike
from tests.tiny_models import CORPUS, CPU, image, random_completions, user, with_values
from tests.train.recording_pair import LORA, TRAINED, Pair, reusing_and_plain

pytestmark = needs_image_processors

COUNTS = [(5, 3), (4,), (2, 6)]
TEMPERATURE = 0.8
MakePolicyNetwork = Callable[..., PolicyNetwork]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}
"""Rotary positions of InternVL 3."""
OTHER_TEXTS = {
    "internvl 3": ("internvl", {"model_type": "qwen2", "rope_parameters": DYNAMIC}),
    "internvl 3.5": ("internvl", {"model_type": "qwen3"}),
}
FAST = (*OTHER_TEXTS, "llava_onevision", "idefics3", "smolvlm", "mistral3", "glm4v", "glm46v", "glm4v_moe")
PLAIN = ("gemma3", "gemma4")
PATHS = [*((kind, path) for kind in FAST for path in (VLM, PlainVLM)), *((kind, PlainVLM) for kind in PLAIN)]
paths = pytest.mark.parametrize(("kind", "path"), PATHS, ids=[f"{kind}, {path.__name__}" for kind, path in PATHS])
fast = pytest.mark.parametrize("kind", FAST)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the folder of a kind once."""
    root = tmp_path_factory.mktemp("named")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            model_type, text = OTHER_TEXTS.get(kind, (kind, None))
            with pytest.MonkeyPatch.context() as patch:
                if text is not None:
                    patch.setitem(KINDS, model_type, replace(KINDS[model_type], text=text))
                save_tiny_kind(model_type, root / kind, CORPUS)
        return root / kind

    return folder


@pytest.fixture
def parts(kind: str, folders: Callable[[str], Path]) -> Loaded:
    return Loaded.of(folders(kind))


def test_every_named_type_is_tested_here() -> None:
    assert NAMED.keys() == {OTHER_TEXTS.get(kind, (kind, None))[0] for kind in (*FAST, *PLAIN)}


@pytest.mark.parametrize("kind", [*FAST, *PLAIN])
def test_prompts_equal_transformers_processor(parts: Loaded, kind: str) -> None:
    family = parts.processor.family
    assert isinstance(family, NamedFamily)
    assert (family.plain_reason == "") is (family.fast_path is not None) is (kind in FAST)
    assert_inputs_equal(parts)


@paths
def test_scores_and_gradients_equal_transformers(path: MakePolicyNetwork, kind: str, parts: Loaded) -> None:
    vlm, completions = with_values(path, parts), random_completions(COUNTS)
    twin = Loaded.of(Path(str(parts.network.name_or_path)))
    found = vlm(pack_row(vlm.family, parts.prompts, completions, CPU), temperature=TEMPERATURE, chunk_tokens=5)
    of_twin = [twin.scores(chat, x, TEMPERATURE) for chat, group in zip(CHATS, completions, strict=True) for x in group]
    logprobs, entropies, states = (torch.cat(each) for each in zip(*of_twin, strict=True))
    values = states @ vlm.value_head.linear.weight[0].detach()
    pairs = [(found.logprobs_A, logprobs), (found.entropies_A, entropies), (found.values_A, values)]
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=0)
    weight_A = torch.from_numpy(np.random.default_rng(0).normal(size=logprobs.shape)).float()
    for side in (0, 1):
        sum(((weight_A * pair[side]).sum() for pair in pairs), torch.zeros(())).backward()
    mine, other = (gradients(each.network) for each in (parts, twin))
    assert any(vlm.family.vision_paths[0] in name for name in other)
    assert moving_difference(mine, other) < 1e-5


@paths
def test_no_row_moves_another(
    path: MakePolicyNetwork, kind: str, parts: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a product of the tokens of one expert rounds by their number
    monkeypatch.setattr(Experts, "run_grouped", Experts.run_all)
    vlm, prompts = path(parts.network, parts.processor.banned_ids), parts.prompts

    def logprobs(completions: Sequence[Sequence[np.ndarray]]) -> Tensor:
        with torch.no_grad():
            return vlm(pack_row(vlm.family, prompts, completions, CPU), temperature=1.0, chunk_tokens=100).logprobs_A

    completions = random_completions(COUNTS)
    found = logprobs(completions)
    completions[1][0] = completions[1][0][::-1].copy()
    again = logprobs(completions)
    assert torch.equal(again[:8], found[:8])
    assert torch.equal(again[12:], found[12:])
    assert not torch.equal(again[8:12], found[8:12])


@pytest.mark.parametrize("kind", ["internvl 3"])
def test_rotary_positions_never_wait_for_a_gpu(parts: Loaded) -> None:
    """On the meta device, whose tensors have no values to wait for."""
    rope = VLM(parts.network, parts.processor.banned_ids).text_rope(
        torch.arange(4, device="meta"), torch.empty(4, 64, device="meta")
    )
    assert rope.cos_ND.shape == (4, 32)


@pytest.mark.parametrize("how", ["full", "selective"])
@fast
def test_gradient_checkpointing_changes_nothing(how: Recompute, kind: str, parts: Loaded) -> None:
    vlm = VLM(parts.network, parts.processor.banned_ids).train()
    row = pack_row(vlm.family, parts.prompts, random_completions(COUNTS), CPU)
    results, estimates = [], []
    for recompute in ("none", how):
        recompute_activations(parts.network, recompute)
        vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
        results.append(gradients(vlm))
        estimates.append(vlm.graph_bytes(row.images))
    assert largest_relative_difference(*results) < 1e-6
    assert 0 < estimates[1] < estimates[0]
    parts.network.requires_grad_(False)
    assert vlm.graph_bytes(row.images) < estimates[1]


@fast
def test_both_engines_draw_the_same_and_the_trainer_scores_it(kind: str, parts: Loaded) -> None:
    prompts, samplings = parts.prompts[::-1], seeded(3, max_new_tokens=12)
    groups = generate(make_engine(parts), prompts, samplings, n=3)
    twins = generate(plain_engine(Loaded.of(Path(str(parts.network.name_or_path)))), prompts, samplings, n=3)
    assert all(same(a, b) for a, b in zip(groups, twins, strict=True))
    assert_scored(VLM(parts.network, parts.processor.banned_ids), prompts, groups)


@fast
def test_an_image_of_a_second_turn_is_drawn_and_scored_as_on_the_plain_path(kind: str, parts: Loaded) -> None:
    assert_drawn_and_scored_alike(parts, Loaded.of(Path(str(parts.network.name_or_path))))


@pytest.mark.parametrize("settings", [TRAINED, LORA], ids=["trained", "lora"])
@pytest.mark.parametrize("kind", ["glm4v"])
def test_gradients_from_recorded_outputs_equal_those_of_a_plain_update(
    kind: str, settings: Model, folders: Callable[[str], Path]
) -> None:
    pairs = reusing_and_plain(lambda: Pair(Loaded.of(folders(kind)), settings))
    assert [pair.metrics["reused_frac"] for pair in pairs] == [1, 0]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("internvl", {"algorithm.kl": {"coef": 0.01}}),
        ("smolvlm", {"model.lora.rank": 4, "train.gradient_checkpointing": "selective"}),
        ("mistral3", {"algorithm.name": "ppo", "model.freeze_vision_tower": True, "model.dtype": "bfloat16"}),
        ("llava_onevision", {"model.freeze_vision_tower": True, "model.freeze_projector": True}),
        ("glm4v", {"model.lora.rank": 4}),
        ("glm4v_moe", {"model.freeze_router": True}),
        ("gemma4", {"algorithm.kl": {"coef": 0.01}}),
    ],
)
def test_it_trains_passes_the_parity_gate_and_is_exported(
    kind: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model, run = save_tiny_kind(kind, tmp_path / "model", CORPUS), tmp_path / "run"
    train_and_export(run, tmp_path / "out", model, settings)
    before, after = Loaded.of(model), Loaded.of(tmp_path / "out")
    base = before.network.to(torch.bfloat16 if "model.dtype" in settings else torch.float32)
    trained = dict(after.network.named_parameters())
    moved = {name for name, x in base.named_parameters() if not torch.equal(trained[name], x.float())}
    trains_vision = not {"model.freeze_vision_tower", "model.lora.rank"} & settings.keys()
    paths = (*before.processor.family.vision_paths, "model.image_newline")
    assert any(name.startswith(paths) for name in moved) is trains_vision
    assert any(name.startswith(before.processor.family.language_path) for name in moved)
    buffers = dict(after.network.named_buffers())
    assert all(torch.equal(buffers[name], x) for name, x in base.named_buffers() if name.endswith("correction_bias"))
    assert before.inputs(CHATS[2])["pixel_values"].shape == after.inputs(CHATS[2])["pixel_values"].shape


@pytest.mark.parametrize("kind", [*FAST, *PLAIN])
def test_the_count_by_size_never_exceeds_the_prompt(parts: Loaded) -> None:
    for size in ((20, 20), (48, 130), (300, 40), (97, 64)):
        chat = user(image(1, *size), "How many?")
        prompt = parts.renderer.prompt(chat)
        assert 0 < parts.renderer.fewest_tokens(chat) <= prompt.num_tokens, size


def test_a_size_of_images_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config.json sets the image size of a internvl"):
        build(run_settings(tmp_path / "run", folders("internvl 3"), **{"model.max_pixels": 1000}))


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout.engine.decode_weights": "int8", "algorithm.importance_sampling_fix": True},
        {"train.backend.liger_kernels": True},
        {"model.attention": "eager"},
    ],
    ids=min,
)
def test_settings_of_the_fast_path_are_refused(
    settings: dict[str, object], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    setting = re.escape(next(iter(settings)))
    with pytest.raises(ConfigError, match=f"{setting}.* own forward|own forward.*{setting}"):
        build(run_settings(tmp_path / "run", folders("gemma3"), **settings))


@pytest.mark.parametrize(
    ("model_type", "text", "reason"),
    [
        ("internvl", {"model_type": "glm4"}, "a decoder of glm4"),
        ("mistral3", {"model_type": "mistral", "sliding_window": 8}, "sliding windows"),
    ],
)
def test_another_decoder_runs_by_the_plain_path(
    model_type: str, text: dict[str, object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, model_type, replace(KINDS[model_type], text=text))
    loaded = Loaded.of(save_tiny_kind(model_type, tmp_path, CORPUS))
    assert loaded.processor.family.plain_reason == reason
    assert loaded.processor.family.fast_path is None
    assert loaded.check(PlainVLM(loaded.network, loaded.processor.banned_ids)) < TOLERANCE


def real_processor(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' processor class of a kind, with stand-ins for packages that only videos and tensors on GPUs use."""
    if kind == "smolvlm":
        module = import_module("transformers.models.smolvlm.processing_smolvlm")
        monkeypatch.setattr(module, "num2words", str)
        return module.SmolVLMProcessor
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = ModuleType("functional")  # type: ignore[attr-defined]
    return import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor


@pytest.mark.parametrize("kind", ["smolvlm", "mistral3"])
def test_a_processor_of_fewer_packages_is_that_of_the_type(
    kind: str, parts: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(parts.network.name_or_path)
    theirs = load_hub_processor(real_processor(kind, monkeypatch), folder, "main")
    for chat in CHATS[1:]:
        found = parts.inputs(chat)
        expected = theirs.inputs(parts.renderer.text(chat), [from_array(ref) for ref in images_of(chat)])
        for name in ("input_ids", "pixel_values"):
            np.testing.assert_array_equal(found[name], expected[name])


def doubled(self: AutoFamily, image: PromptImage) -> str:
    return 2 * TEXT_OF(self, image)


def one_axis(self: AutoFamily, ids: Tensor, images: list[PromptImage]) -> dict[str, Tensor]:
    """M-RoPE positions without height and width."""
    return INPUTS_OF(self, ids, images) | {"position_ids": torch.arange(ids.shape[1]).expand(3, *ids.shape)}


def without_kinds(self: AutoFamily, ids: Tensor, images: list[PromptImage]) -> dict[str, Tensor]:
    return {name: x for name, x in INPUTS_OF(self, ids, images).items() if not name.endswith("token_type_ids")}


TEXT_OF, INPUTS_OF = AutoFamily.image_text, AutoFamily.forward_inputs
FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "doubled": ("image_text", doubled, r"with 1 images has \d+ token ids that differ from the processor's \d+"),
    "axes": ("forward_inputs", one_axis, r"log-probs differ from those of transformers' forward by .*"),
    "kinds": ("forward_inputs", without_kinds, r"no (mm_)?token_type_ids, which the processor returns"),
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *((kind, "doubled") for kind in (*FAST, *PLAIN)),
        *((kind, fault) for kind in ("glm4v", "glm46v", "glm4v_moe") for fault in ("axes", "kinds")),
        *((kind, "kinds") for kind in ("gemma3", "gemma4")),
    ],
)
def test_a_broken_family_is_stopped(kind: str, fault: str, parts: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, message = FAULTS[fault]
    monkeypatch.setattr(AutoFamily, name, broken)
    with pytest.raises(ModelError, match=rf", cannot be trained .*: .*{message}; set model\.path to another"):
        parts.check(PlainVLM(parts.network, parts.processor.banned_ids))


@pytest.mark.parametrize("kind", ["glm4v_moe"])
def test_dropped_axes_of_the_fast_path_are_stopped(kind: str, parts: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = VLM(parts.network, parts.processor.banned_ids)
    of_time = type(vlm.family).positions

    def positions(self: Any, *args: Any) -> Any:
        positions_3L, end = of_time(self, *args)
        return positions_3L[:1].repeat(3, axis=0), end

    monkeypatch.setattr(type(vlm.family), "positions", positions)
    with pytest.raises(ModelError, match=r"log-probs differ from those of transformers' forward by"):
        parts.check(vlm)


@paths
def test_a_tower_that_was_not_loaded_is_stopped(path: MakePolicyNetwork, kind: str, parts: Loaded) -> None:
    with torch.no_grad():
        for parameter in parts.network.get_submodule(parts.processor.family.vision_paths[0]).parameters():
            parameter.zero_()
    with pytest.raises(ModelError, match="another picture does not change the log-probs: the vision tower is not"):
        parts.check(path(parts.network, parts.processor.banned_ids))
