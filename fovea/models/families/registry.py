"""Which families there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fovea.errors import ModelError
from fovea.models.families.base import ModelFamily
from fovea.models.families.qwen_vl import QwenVL

FAMILIES: dict[str, Callable[[Any], ModelFamily]] = {
    "qwen2_vl": QwenVL.of,
    "qwen2_5_vl": QwenVL.of,
    "qwen3_vl": QwenVL.of,
}
"""By transformers' `model_type`: the family of a config."""


def family_of(config: Any, path: str) -> ModelFamily:
    """The family of the transformers config of the model at `path`; ModelError when Fovea has none for it."""
    make = FAMILIES.get(config.model_type)
    if make is None:
        raise ModelError(
            f"model.path={path}: its model_type is {config.model_type}, and Fovea trains {', '.join(FAMILIES)}; "
            "give one of these"
        )
    return make(config)
