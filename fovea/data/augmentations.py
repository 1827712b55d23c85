"""Changed pictures: noise and masks, made of RGB values [Y, X, C] by a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fovea.config.augmentations import MaskedPictures, NoisyPictures

DIFFUSION_STEPS = 1000
LOWEST_BETA, HIGHEST_BETA = 1e-5, 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Gaussian noise of a diffusion process at one of its 1000 steps."""

    step: int

    def __call__(self, pixels_YXC: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """sqrt(a) x + sqrt(1 - a) noise of x in 0..1, clipped, with a the product of 1 - beta up to `step`.

        beta rises from 1e-5 to .005 as a sigmoid of -6..6. Liu et al., NoisyRollout, arXiv 2504.13055;
        John-AI-Lab/NoisyRollout, verl/utils/image_aug.py.
        """
        betas = LOWEST_BETA + (HIGHEST_BETA - LOWEST_BETA) / (1 + np.exp(-np.linspace(-6, 6, DIFFUSION_STEPS)))
        kept = np.cumprod(1 - betas)[self.step]
        noise_YXC = rng.standard_normal(pixels_YXC.shape, dtype=np.float32)
        noisy_YXC = math.sqrt(kept) * (pixels_YXC / np.float32(255)) + math.sqrt(1 - kept) * noise_YXC
        return (255 * noisy_YXC.clip(0, 1)).astype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Square patches, each black with some probability."""

    ratio: float
    patch_px: int

    def __call__(self, pixels_YXC: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """The picture with black patches, those at its right and lower edge cut. PAPO and VPPO mask like this."""
        height, width = pixels_YXC.shape[:2]
        side = self.patch_px
        is_black = rng.random((-(-height // side), -(-width // side))) < self.ratio
        is_black_YX = is_black.repeat(side, axis=0).repeat(side, axis=1)[:height, :width]
        return np.where(is_black_YX[..., None], np.uint8(0), pixels_YXC)


Augmentation: TypeAlias = Noise | Mask
"""A way to change a picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededAugmentation:
    """A change of one picture: `ImageRef.change`."""

    change: Augmentation
    seed: tuple[int, ...]

    def __call__(self, pixels_YXC: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return self.change(pixels_YXC, np.random.default_rng(self.seed))


def noise_of(settings: NoisyPictures, step: int, max_steps: int) -> Noise:
    """The noise of training step 1, 2, ...: noise_step times 1 - sigmoid(k (step - mid) / max_steps), rounded down."""
    left = 1.0
    if settings.decay_steepness is not None:
        x = settings.decay_steepness * (step - settings.decay_mid_step) / max_steps
        left = 1 / (1 + math.exp(min(x, 100.0)))
    return Noise(step=int(settings.noise_step * left))


def mask_of(settings: MaskedPictures) -> Mask:
    """The mask of a term of the loss."""
    return Mask(ratio=settings.mask_ratio, patch_px=settings.mask_patch_px)
