"""Registry of model families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as HUB_TYPES

from fovea.errors import ModelError
from fovea.models.families.auto import AutoFamily
from fovea.models.families.base import ModelFamily
from fovea.models.families.named import NAMED
from fovea.models.families.qwen_vl import Qwen2VL, Qwen3VL, Qwen3VLMoe, Qwen25VL, Qwen35, Qwen35Moe
from fovea_gym.utils.entry_points import load, registered

GROUP = "fovea.families"
"""Entry-point group in which other packages register constructors of families, by `model_type`."""

FAMILIES: dict[str, Callable[[Any], ModelFamily]] = {
    Qwen2VL.model_type: Qwen2VL.of,
    Qwen25VL.model_type: Qwen25VL.of,
    Qwen3VL.model_type: Qwen3VL.of,
    Qwen3VLMoe.model_type: Qwen3VLMoe.of,
    Qwen35.model_type: Qwen35.of,
    Qwen35Moe.model_type: Qwen35Moe.of,
    **NAMED,
}
"""Constructors of families from a transformers config, by its `model_type`."""


def known() -> list[str]:
    """The `model_type`s of all families, including those that other packages register."""
    return [*FAMILIES, *registered(GROUP)]


def family_of(config: Any, path: str) -> ModelFamily:
    """Model family of a transformers config; ModelError for an unsupported `model_type`. `path` is for the message."""
    make: Any = load(GROUP, config.model_type, FAMILIES) or FAMILIES.get(config.model_type)
    if make is None and config.model_type in HUB_TYPES:
        make = AutoFamily.of
    if make is None:
        raise ModelError(
            f"model.path={path}: its model_type is {config.model_type}, but Fovea only trains {', '.join(known())}; "
            "choose one of these, or add the family (docs/extending.md)"
        )
    family: ModelFamily = make(config)
    return family
