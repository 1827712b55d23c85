"""Tower and projector frozen apart: what is trained, and its gradients, as in transformers' own forward."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from fovea.config.model import Lora, Model, TinyModel
from fovea.models.modules import projector_modules
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable, count_parameters, trainable_parameters
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from tests.idefics3 import make_network, make_tokenizer
from tests.reference import gradients, largest_relative_difference, reference_logprobs
from tests.tiny_models import CORPUS, CPU, mixed_prompts, random_completions

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


def test_the_connector_is_the_projector_of_idefics3() -> None:
    network = make_network(make_tokenizer(CORPUS))
    assert projector_modules(network) == [network.model.connector]


def test_adapters_leave_no_projector_to_train() -> None:
    with pytest.raises(ValidationError, match=r"model\.freeze_projector=false, but with model\.lora only adapters"):
        Model(tiny=TinyModel(), lora=Lora(), freeze_projector=False)
    assert not Model(tiny=TinyModel(), lora=Lora()).trains_projector


def test_features_behind_a_trained_projector_do_not_last() -> None:
    projector = {"tiny": TinyModel(), "freeze_vision_tower": True, "freeze_projector": False}
    with pytest.raises(ValidationError, match="features of a vision tower or projector that is trained do not last"):
        Model.model_validate({**projector, "feature_spill_gib": 1.0})
    assert Model.model_validate(projector).trains_vision
