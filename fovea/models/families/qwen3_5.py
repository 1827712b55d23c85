"""Qwen3.5: a Qwen3-VL tower without deepstack before a decoder whose layers are mostly gated delta nets."""

from __future__ import annotations

from typing import ClassVar

from fovea.models.families.base import FastPath
from fovea.models.families.qwen_vl import VISION, Qwen3VL


class Qwen35(Qwen3VL):
    """ModelFamily of Qwen3.5."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_5"
    fast_path: ClassVar[FastPath | None] = None
    projector_paths: ClassVar[tuple[str, ...]] = (f"{VISION}.merger",)
