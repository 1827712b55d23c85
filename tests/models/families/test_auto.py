"""Models without a family: prompts, log-probs, gradients and draws against transformers, training and export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Pix2StructConfig

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.families.auto import AutoFamily
from fovea.models.families.registry import FAMILIES
from fovea.models.plain import PlainVLM
from fovea.models.processor import load_processor
from fovea.train.packing import pack_row
from fovea_tools.families.tiny import KINDS, save_tiny_kind
from tests.hub_models import (
    CHATS,
    TOLERANCE,
    Loaded,
    assert_inputs_equal,
    assert_scored,
    moving_difference,
    needs_image_processors,
)
from tests.plain_runs import train_and_export
from tests.reference import gradients
from tests.rollout.drawing import generate, plain_engine, seeded
from tests.tiny_models import CORPUS, CPU, random_completions

pytestmark = needs_image_processors


@pytest.fixture(scope="module", params=sorted(KINDS.keys() - FAMILIES.keys()))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded.of(save_tiny_kind(request.param, tmp_path_factory.mktemp(request.param), CORPUS))


@pytest.fixture(scope="module")
def vlm(loaded: Loaded) -> PlainVLM:
    return PlainVLM(loaded.network, loaded.processor.banned_ids)


def test_prompts_equal_transformers_processor(loaded: Loaded) -> None:
    assert_inputs_equal(loaded)


def test_logprobs_and_gradients_equal_transformers_and_no_row_moves_another(loaded: Loaded, vlm: PlainVLM) -> None:
    completions, prompts = random_completions([(5, 3), (4,), (2, 6)]), loaded.prompts
    found = vlm(pack_row(vlm.family, prompts, completions, CPU), temperature=1.0, chunk_tokens=100).logprobs_A
    expected = torch.cat(
        [loaded.scores(chat, x, 1.0)[0] for chat, group in zip(CHATS, completions, strict=True) for x in group]
    )
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    both = []
    for logprobs in (found, expected):
        logprobs.sum().backward()
        both.append(gradients(loaded.network))
    assert moving_difference(*both) < 1e-5
    completions[1][0] = completions[1][0][::-1].copy()
    with torch.no_grad():
        row = pack_row(vlm.family, prompts, completions, CPU)
        again = vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A
    assert torch.equal(again[:8], found[:8])
    assert torch.equal(again[12:], found[12:])
    assert not torch.equal(again[8:12], found[8:12])


def test_the_engine_draws_what_the_trainer_scores(loaded: Loaded, vlm: PlainVLM) -> None:
    """A prompt without images after others, so that no position of theirs is left."""
    prompts = loaded.prompts[::-1]
    groups = generate(plain_engine(loaded), prompts, seeded(3, max_new_tokens=8), n=2)
    assert_scored(vlm, prompts, groups)


def test_the_start_check_passes(loaded: Loaded, vlm: PlainVLM) -> None:
    assert loaded.check(vlm) < TOLERANCE


def test_the_setting_and_the_model_must_agree(tmp_path: Path) -> None:
    folder = str(save_tiny_kind("llava", tmp_path / "llava", CORPUS))
    with pytest.raises(ModelError, match=r"model_type is llava, but Fovea only has .*; set model\.family=auto"):
        load_processor(Model(path=folder))
    named = str(save_tiny_kind("internvl", tmp_path / "internvl", CORPUS))
    with pytest.raises(
        ModelError, match=r"family=auto, but Fovea has a family for .*, a internvl; remove model\.family"
    ):
        load_processor(Model(path=named, family="auto"))


def test_a_config_without_a_visual_token_is_refused() -> None:
    with pytest.raises(ModelError, match=r"config of a pix2struct has no image_token_id or image_token_index"):
        _ = AutoFamily.of(Pix2StructConfig()).image_token_id


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("vipllava", {"algorithm.kl": {"coef": 0.01}}),
        ("aya_vision", {"model.lora.rank": 4, "train.gradient_checkpointing": "selective"}),
        ("llava", {"algorithm.name": "ppo", "model.freeze_vision_tower": True, "model.dtype": "bfloat16"}),
    ],
    ids=["grpo", "lora", "ppo"],
)
def test_it_trains_passes_the_parity_gate_and_is_exported(
    kind: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model, folder = save_tiny_kind(kind, tmp_path / "model", CORPUS), tmp_path / "run"
    train_and_export(folder, tmp_path / "out", model, {"model.family": "auto", **settings})
    again = Loaded.of(tmp_path / "out")
    assert again.check(PlainVLM(again.network, again.processor.banned_ids)) < TOLERANCE
