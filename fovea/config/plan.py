"""Settings of `fovea plan`: the machine, and the lengths that a plan assumes where a recipe only has limits."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fovea.config.base import Fraction, PositiveInt, Section

GpuName: TypeAlias = Literal[
    "cpu", "a100-40", "a100-80", "h100", "h200", "b200", "l40s", "rtx4090", "rtx5090", "rtx3090", "a10", "l4"
]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]


class Plan(Section):
    """What `fovea plan` assumes; a run itself reads none of it."""

    gpus: PositiveInt | None = None
    """GPUs of the run, one process on each; default: those of `cluster`, else 1."""
    gpu: GpuName | None = None
    """Kind of GPU; default: that of this machine, cpu where there is none."""
    headroom_frac: Fraction = 0.1
    """Share of a GPU's memory that must stay free: CUDA's context, NCCL's buffers, fragmentation."""
    prompt_tokens: PositiveInt | None = None
    """Length of a prompt, visual tokens counted; default: the longest, data.max_prompt_tokens."""
    completion_tokens: PositiveInt | None = None
    """Length of a completion; default: the longest, rollout.max_new_tokens."""
    images_per_prompt: Annotated[int, Field(ge=0)] = 1
    """Images of a prompt."""
    image_tokens: PositiveInt | None = None
    """Visual tokens of an image; default: those of model.max_pixels, else as many as a prompt holds."""
    distinct_images: PositiveInt | None = None
    """Different images of the training rows, whose features a frozen vision tower keeps; default: enough to fill
    model.feature_cache_gib."""
    update_mfu: Share = 0.35
    """Share of the GPU's peak FLOP rate that forward and backward passes reach, for the estimate of seconds."""
    decode_bandwidth_frac: Share = 0.5
    """Share of the GPU's memory bandwidth that decoding reaches, for the estimate of seconds."""
