"""Qwen3-VL-MoE (arXiv 2511.21631)."""

from __future__ import annotations

from typing import ClassVar

from fovea.models.families.qwen3_vl import Qwen3VL


class Qwen3VLMoe(Qwen3VL):
    """ModelFamily of Qwen3-VL-MoE: Qwen3-VL with a mixture of experts in place of the decoder's MLPs."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_vl_moe"
