"""Groups of samples by their numbers of tokens, and costs by which they are packed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from fovea.models.flops import Passes, Work
from fovea.types import PromptImage, Sample, SampleGroup
from tests.records import sample_of, text_prompt

TRAINED = Passes(linear=3, attention=3, vision=3, vision_attention=3)
CACHED = Passes(linear=3, attention=3, vision=0, vision_attention=0)
PLAIN = Work(token=2, pair=0, action=0, patch=0, image_pair=0, window_pair=0, window_side=0)
"""Tokens are all there is."""
FULL = Work(token=2, pair=4, action=6, patch=8, image_pair=10, window_pair=0, window_side=0)


def group(prompt_tokens: int, *completions: int, grid: tuple[int, int, int] | None = None) -> SampleGroup:
    images = () if grid is None else (PromptImage(key="", tensors={}, num_tokens=1, grid=grid),)
    prompt = replace(text_prompt(range(prompt_tokens)), images=images)
    return SampleGroup(prompt=prompt, samples=tuple(sample(tokens) for tokens in completions))


FIRST_IDS = itertools.count()
"""No two completions begin alike: equal ones would share their tokens (`tests/train/test_equal_samples.py`)."""


def sample(tokens: int) -> Sample:
    return sample_of(next(FIRST_IDS) + np.arange(tokens), advantages_T=np.zeros(tokens, dtype=np.float32))
