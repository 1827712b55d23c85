"""Model folders of strangers: numbers that no model can have, templates and tokenizers that do not end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.models.load import empty_network, load_network
from fovea.models.processor import load_processor
from fovea.utils.config_numbers import check_numbers
from fovea_tools.plan.model_sizes import model_sizes
from gym_tests.tables import table
from tests.tiny_models import save, tiny

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("qwen3_vl"), tmp_path_factory.mktemp("model"))


def with_value(folder: Path, file: str, keys: Sequence[str], value: object) -> str:
    """The file's text before this value was put into it."""
    before = (folder / file).read_text()
    content: Any = json.loads(before)
    inner = content
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = value
    (folder / file).write_text(json.dumps(content))
    return before


@table(
    ("file", "name", "value"),
    [
        (CONFIG, "vision_config.patch_size", 0),
        (CONFIG, "vision_config.patch_size", "8"),
        (CONFIG, "vision_config.patch_size", 8.5),
        (CONFIG, "vision_config.spatial_merge_size", 0),
        (CONFIG, "vision_config.temporal_patch_size", -2),
        (CONFIG, "vision_config.depth", 10**9),
        (CONFIG, "vision_config.num_heads", 0),
        (CONFIG, "vision_config.hidden_size", 10**12),
        (CONFIG, "text_config.num_attention_heads", 0),
        (CONFIG, "text_config.num_attention_heads", True),
        (CONFIG, "text_config.num_key_value_heads", 3),
        (CONFIG, "text_config.num_hidden_layers", 10**9),
        (CONFIG, "text_config.num_hidden_layers", 1e9),
        (CONFIG, "text_config.hidden_size", -64),
        (CONFIG, "text_config.head_dim", 0),
        (CONFIG, "text_config.vocab_size", 10**12),
        (CONFIG, "text_config.max_position_embeddings", 0),
        (CONFIG, "text_config.rms_norm_eps", float("nan")),
        (CONFIG, "text_config.rms_norm_eps", -1e-6),
        (CONFIG, "text_config.rope_parameters.rope_theta", 0),
        (CONFIG, "text_config.rope_parameters.rope_theta", float("inf")),
        (CONFIG, "text_config.attention_dropout", 2),
        (CONFIG, "text_config.eos_token_id", -7),
        (CONFIG, "image_token_id", -5),
        (CONFIG, "vision_start_token_id", -1),
        (PROCESSOR, "patch_size", 0),
        (PROCESSOR, "merge_size", 0),
        (PROCESSOR, "temporal_patch_size", 0),
        (PROCESSOR, "image_std", [0.5, 0, 0.5]),
        (PROCESSOR, "image_mean", [0.5, float("nan"), 0.5]),
        (PROCESSOR, "rescale_factor", 0.0),
        (PROCESSOR, "size.shortest_edge", 0),
        (PROCESSOR, "size.longest_edge", 100),
    ],
)
def test_a_number_that_no_model_can_have_is_named(folder: Path, file: str, name: str, value: object) -> None:
    """By whatever reads the folder first: the processor, the network, the network without weights."""
    settings, before = Model(path=str(folder)), with_value(folder, file, name.split("."), value)
    try:
        for read in (load_processor, load_network, empty_network):
            with pytest.raises(ModelError, match=r"must be .*; correct it, or download the model again") as error:
                read(settings)
            assert name.rpartition(".")[2] in str(error.value)
            assert file in str(error.value)
    finally:
        (folder / file).write_text(before)


@table(("name", "value"), [("text_config.num_hidden_layers", 10**9), ("vision_config.patch_size", 0)])
def test_a_plan_names_such_a_number(folder: Path, name: str, value: object) -> None:
    before = with_value(folder, CONFIG, name.split("."), value)
    config = Config.model_validate({"model": {"path": str(folder)}, "environment": {"name": "shapes"}})
    try:
        with pytest.raises(ModelError, match=rf"{name}={value} in its config.json must be a whole number from 1"):
            model_sizes(config)
    finally:
        (folder / CONFIG).write_text(before)


@table("kind", {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES})
def test_the_numbers_of_models_that_transformers_knows_are_accepted(kind: str) -> None:
    try:
        config = AutoConfig.for_model(kind)
    except (ImportError, OSError, ValueError, TypeError):
        return  # needs a package or a part that is not there
    check_numbers(kind, CONFIG, json.loads(json.dumps(config.to_dict(), default=str)))
