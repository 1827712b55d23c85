"""LoRA by peft: what is adapted, what the merge gives, what the adapters switched off give."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError

from fovea.config.model import Lora, Model, TinyModel
from fovea.models.modules import projector_modules
from fovea.models.plain import PlainVLM
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.tiny import TinyParts
from fovea.models.trainable import (
    ADAPTER,
    adapters_off,
    choose_trainable,
    count_parameters,
    lora_layers,
    merged_weights,
    part_of,
    trainable_parameters,
)
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea_gym.errors import ConfigError, FoveaError
from fovea_tools.families.tiny import save_tiny_kind
from tests.hub_models import Loaded, needs_image_processors
from tests.reference import gradients, largest_relative_difference, reference_logprobs
from tests.tiny_models import CORPUS, CPU, mixed_prompts, packed_logprobs, random_completions, tiny

on_parts = pytest.mark.parametrize(
    "adapted_parts",
    [["language_model"], ["language_model", "vision_tower", "projector"]],
    ids=["language model", "everywhere"],
)


def with_lora(parts: TinyParts, /, **lora: object) -> TinyParts:
    settings = Model(tiny=TinyModel(), lora=Lora.model_validate(lora))
    choose_trainable(parts.network, settings, seed=0)
    with torch.no_grad():
        for name, parameter in parts.network.named_parameters():
            if "lora_B" in name:  # zero at the start: make the adapters do something
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return parts


def test_targets_and_exclude_are_obeyed(parts: TinyParts) -> None:
    with_lora(parts, rank=2, targets=["q_proj", "o_proj"], exclude=["layers.0"])
    layers = set(lora_layers(parts.network))
    assert {name.split(".")[-1] for name in layers} == {"q_proj", "o_proj"}
    assert not any(".layers.0." in name for name in layers)


@pytest.mark.parametrize("name", ["qproj", "lm_head"])
def test_targets_that_match_nothing_are_refused(name: str, parts: TinyParts) -> None:
    """A head tied to the embedding gets no adapter: the rollout would draw from the head without it."""
    refused = rf"{name} .* matches no linear layer of the language model; leave model\.lora\.targets out"
    with pytest.raises(ConfigError, match=refused):
        with_lora(parts, targets=["q_proj", name])


def test_adapters_on_vision_are_on_all_of_its_linear_layers(parts: TinyParts) -> None:
    """Those of the tower, of its projector, or both; nothing else is trained."""
    family = parts.processor.family
    linears = {
        part: {
            name
            for name, module in parts.network.named_modules()
            if isinstance(module, torch.nn.Linear) and part_of(name, family) == part.replace("_", " ")
        }
        for part in ("vision_tower", "projector")
    }
    assert all(linears.values())
    for chosen in (["vision_tower"], ["projector"], [*linears]):
        again = with_lora(tiny(family.model_type), parts=chosen)
        assert adapted(again) == set().union(*(linears[part] for part in chosen))
        assert all(".lora_" in name for name in trainable_parameters(again.network))


def test_a_frozen_tower_has_no_adapters() -> None:
    with pytest.raises(ValidationError, match="model\.freeze_vision_tower=true, but model\.lora\.parts"):
        Model(tiny=TinyModel(), freeze_vision_tower=True, lora=Lora(parts=("vision_tower",)))


@on_parts
def test_merged_weights_give_the_adapted_model(adapted_parts: list[str], parts: TinyParts) -> None:
    with_lora(parts, rank=4, parts=adapted_parts)
    merged = dict(merged_weights(parts.network))
    plain = tiny(str(parts.network.config.model_type))
    own = dict(plain.network.named_parameters())
    assert merged.keys() == own.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(merged[name])
    torch.testing.assert_close(packed_logprobs(plain), packed_logprobs(parts), atol=1e-5, rtol=0)


def test_weights_without_adapters_are_not_copied(parts: TinyParts) -> None:
    own = dict(parts.network.named_parameters())
    for name, tensor in merged_weights(parts.network):
        assert tensor.data_ptr() == own[name].data_ptr()


@on_parts
def test_adapters_off_is_the_model_before(adapted_parts: list[str], parts: TinyParts) -> None:
    before = packed_logprobs(parts)
    with_lora(parts, rank=4, parts=adapted_parts)
    with adapters_off(parts.network):
        torch.testing.assert_close(packed_logprobs(parts), before, atol=1e-6, rtol=0)
    assert not torch.allclose(packed_logprobs(parts), before, atol=1e-3)


@on_parts
def test_equal_to_peft_as_its_users_call_it(adapted_parts: list[str], parts: TinyParts) -> None:
    """The same adapters through get_peft_model, weights copied over, give the same log-probs."""
    with_lora(parts, rank=4, alpha=12, parts=adapted_parts)
    expected = packed_logprobs(parts)
    plain = tiny(str(parts.network.config.model_type))
    names = [name for name, module in plain.network.named_modules() if isinstance(module, torch.nn.Linear)]
    where = ("language_model", "visual") if len(adapted_parts) > 1 else ("language_model",)
    targets = [name for name in names if any(each in name for each in where)]
    wrapped = get_peft_model(plain.network, LoraConfig(r=4, lora_alpha=12, target_modules=targets))
    theirs = dict(wrapped.base_model.model.named_parameters())
    with torch.no_grad():
        for name, parameter in parts.network.named_parameters():
            theirs[name].copy_(parameter)
    torch.testing.assert_close(packed_logprobs(plain), expected, atol=1e-6, rtol=0)


def test_the_table_adds_up(parts: TinyParts) -> None:
    with_lora(parts, rank=4)
    rows = {row.part: row for row in count_parameters(parts.network)}
    assert rows["all"].total == sum(p.numel() for p in parts.network.parameters())
    assert (
        rows["all"].trainable
        == rows["LoRA adapters"].total
        == sum(p.numel() for p in trainable_parameters(parts.network).values())
    )
    assert rows["vision tower"].trainable == 0


def adapted(parts: TinyParts) -> set[str]:
    return set(lora_layers(parts.network))


def test_all_linear_is_every_linear_layer_of_the_language_model(parts: TinyParts) -> None:
    """As peft's own: all but the head."""
    with_lora(parts, rank=2, targets="all-linear")
    linears = {name for name, module in tiny(parts.network.config.model_type).network.named_modules()
               if isinstance(module, torch.nn.Linear)}  # fmt: skip
    assert adapted(parts) == {name for name in linears if "language_model" in name}


@pytest.mark.parametrize(
    ("exclude", "left_out"),
    [
        (r"layers\.(0|2)\.self_attn", r"\.(0|2)\.self_attn"),
        ([r"down_proj$", ".*visual.*"], "down_proj"),
        (["layers.1."], r"\.1\."),
    ],
)
def test_exclude_takes_regular_expressions(exclude: object, left_out: str) -> None:
    all_of_them, some = tiny("qwen3_vl"), tiny("qwen3_vl")
    with_lora(all_of_them)
    with_lora(some, exclude=exclude)
    assert adapted(some) < adapted(all_of_them)
    assert adapted(some) == {name for name in adapted(all_of_them) if not re.search(left_out, name)}


def test_an_exclusion_that_excludes_nothing_is_refused(parts: TinyParts) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.exclude: layer\\\.0 matches no linear layer, such as model"):
        with_lora(parts, exclude=[r"layer\.0"])
    with pytest.raises(ValidationError, match="is not a regular expression"):
        Lora.model_validate({"exclude": ["*layers"]})


class OneMask(torch.nn.Dropout):
    """Drops the same inputs of all tokens, so that two forward passes may cut and order the tokens as they like."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[-1], generator=torch.Generator().manual_seed(x.shape[-1])) >= self.p
        return x * kept / (1 - self.p)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_dropout_is_pefts_and_of_updates_alone(checkpointing: Recompute) -> None:
    """Values and gradients of peft's layers in transformers' own forward."""
    ours, theirs, without = (tiny("qwen3_vl") for _ in range(3))
    for parts in (ours, theirs, without):
        parts.network.eval()
        with_lora(parts, rank=4, dropout=0.0 if parts is without else 0.3)
    recompute_activations(ours.network, checkpointing)
    torch.testing.assert_close(packed_logprobs(ours), packed_logprobs(without), atol=1e-6, rtol=0)
    row = pack_row(ours.processor.family, mixed_prompts(ours), random_completions([(4, 6), (3,), (5,)]), CPU)
    found = []
    for parts, kind in ((ours, VLM), (theirs, PlainVLM)):
        model = kind(parts.network, parts.processor.banned_ids).train()
        for layer in lora_layers(parts.network).values():
            assert isinstance(layer.lora_dropout[ADAPTER], torch.nn.Dropout)
            layer.lora_dropout[ADAPTER] = OneMask(0.3)
        scores = model(row, temperature=1.0, chunk_tokens=100)
        scores.logprobs_A.sum().backward()
        gradients = {name: x.grad for name, x in trainable_parameters(parts.network).items()}
        found.append((scores.logprobs_A.detach(), gradients))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)
    assert (found[0][0] - packed_logprobs(without)).abs().max() > 1e-3


def test_a_group_shares_the_mask_of_its_prompt() -> None:
    """Completions that differ in the last token, which is not an input, differ by the masks of their tokens only."""
    parts = tiny("qwen3_vl")
    with_lora(parts, rank=4, dropout=0.5)
    ids = random_completions([(4,)])[0][0]
    other = np.append(ids[:-1], ids[-1] + 1)
    row = pack_row(parts.processor.family, mixed_prompts(parts)[:1], [[ids, other]], CPU)
    with torch.no_grad():
        first, second = (
            VLM(parts.network, parts.processor.banned_ids)
            .train()(row, temperature=1.0, chunk_tokens=100)
            .logprobs_A.split(4)
        )
    assert first[0] == second[0]
    assert (first[1:-1] != second[1:-1]).all()


def test_on_the_meta_device_no_adapter_is_read_from_disk() -> None:
    """As a plan and a dry run have the network: they ask only for its shapes."""
    parts, settings = tiny("qwen3_vl"), Model(path="x", lora=Lora(rank=4, adapter="no_such_folder"))
    with torch.device("meta"):
        network = type(parts.network)(parts.network.config)
    choose_trainable(network, settings, seed=0)
    assert {parameter.device.type for parameter in trainable_parameters(network).values()} == {"meta"}
    with pytest.raises(FoveaError, match="no_such_folder"):
        choose_trainable(parts.network, settings, seed=0)


GRADIENT_TOLERANCE = 1e-4
MERGERS = ("model.visual.merger.", "model.visual.deepstack_merger_list.")
"""Beginnings of the names that transformers gives the projector of a Qwen-VL."""


def is_projector(name: str) -> bool:
    return name.startswith(MERGERS)


def is_tower(name: str) -> bool:
    return name.startswith("model.visual.") and not is_projector(name)


def chosen(parts: TinyParts, **settings: object) -> set[str]:
    choose_trainable(parts.network, Model.model_validate({"tiny": TinyModel(), **settings}), seed=0)
    return set(trainable_parameters(parts.network))


def test_each_is_frozen_by_its_own_setting_and_the_projector_with_the_tower_by_default(parts: TinyParts) -> None:
    names = {name for name, _ in parts.network.named_parameters()}
    tower, projector = set(filter(is_tower, names)), set(filter(is_projector, names))
    assert tower
    assert projector
    assert chosen(parts) == names
    assert chosen(parts, freeze_vision_tower=True) == names - tower - projector
    assert chosen(parts, freeze_vision_tower=True, freeze_projector=False) == names - tower
    assert chosen(parts, freeze_projector=True) == names - projector
    rows = {row.part: row for row in count_parameters(parts.network)}
    assert (rows["vision tower"].trainable, rows["projector"].trainable) == (rows["vision tower"].total, 0)


@pytest.mark.parametrize(
    "settings",
    [{"freeze_vision_tower": True, "freeze_projector": False}, {"freeze_projector": True}],
    ids=["projector", "tower"],
)
def test_gradients_are_those_of_transformers(parts: TinyParts, settings: dict[str, bool]) -> None:
    prompts, completions = mixed_prompts(parts), random_completions([(4, 6), (3,), (5,)])
    trained = chosen(parts, **settings)
    pairs = zip(prompts, completions, strict=True)
    logprobs = [reference_logprobs(parts, prompt, ids) for prompt, group in pairs for ids in group]
    torch.cat(logprobs).sum().backward()
    expected = gradients(parts.network)
    assert expected.keys() == trained
    vlm = VLM(parts.network, parts.processor.banned_ids).train()
    assert vlm.trains_vision
    assert vlm.trains_tower is any(map(is_tower, trained))
    row = pack_row(parts.processor.family, prompts, completions, CPU)
    vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
    assert largest_relative_difference(expected, gradients(parts.network)) < GRADIENT_TOLERANCE


@needs_image_processors
def test_the_connector_is_the_projector_of_idefics3(tmp_path: Path) -> None:
    network = Loaded.of(save_tiny_kind("idefics3", tmp_path, CORPUS)).network
    assert projector_modules(network) == [network.model.connector]


def test_adapters_leave_no_projector_to_train() -> None:
    with pytest.raises(ValidationError, match=r"model\.freeze_projector=false, but with model\.lora only adapters"):
        Model(tiny=TinyModel(), lora=Lora(), freeze_projector=False)
    assert not Model(tiny=TinyModel(), lora=Lora()).trains_projector


def test_a_projector_behind_a_frozen_tower_trains_the_vision() -> None:
    assert Model(tiny=TinyModel(), freeze_vision_tower=True, freeze_projector=False).trains_vision
