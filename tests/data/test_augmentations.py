"""Changed pictures: the noise and masks of the authors' code, by seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fovea.config.augmentations import NoisyPictures
from fovea.data.augmentations import Mask, Noise, SeededAugmentation, noise_of
from fovea_gym.types import ImageRef
from gym_tests.images import from_array
from gym_tests.tables import table

GREY = np.full((70, 84, 3), 128, np.uint8)


@table("step", [0, 250, 500, 999])
def test_noise_is_that_of_the_authors_process(step: int) -> None:
    """image_aug.py: q_x of a picture in 0..1, clamped, and cut to 8 bits as torchvision's ToPILImage does."""
    betas = torch.sigmoid(torch.linspace(-6, 6, 1000)) * (0.5e-2 - 1e-5) + 1e-5
    product = torch.cumprod(1 - betas, dim=0)
    noise = torch.from_numpy(np.random.default_rng(4).standard_normal(GREY.shape, dtype=np.float32))
    picture = torch.from_numpy(GREY / np.float32(255))
    theirs = torch.sqrt(product)[step] * picture + torch.sqrt(1 - product)[step] * noise
    expected = torch.clamp(theirs, 0.0, 1.0).mul(255).byte().numpy()
    found = Noise(step=step)(GREY, np.random.default_rng(4))
    assert np.abs(found.astype(int) - expected).max() <= 1, "rounding, where a value is on the edge of two"
    assert (found != expected).mean() < 0.001


def test_noise_decays_as_the_authors_sigmoid() -> None:
    settings = NoisyPictures()  # 500 steps of noise, steepness 30, middle 40, as their script for Geometry3K
    found = [noise_of(settings, step, 60).step for step in (1, 30, 40, 50, 60)]
    assert found == [499, 496, 250, 3, 0]  # int(500 * (1 - 1 / (1 + exp(-30 * (step / 60 - 40 / 60)))))
    assert noise_of(NoisyPictures(decay_steepness=None), 60, 60).step == 500
    assert noise_of(settings, 10**6, 1).step == 0


def test_a_mask_blackens_whole_patches() -> None:
    masked = Mask(ratio=0.6, patch_px=14)(GREY, np.random.default_rng(0))
    patches = masked.reshape(5, 14, 6, 14, 3).swapaxes(1, 2).reshape(30, -1)
    assert {frozenset(patch.tolist()) for patch in patches} == {frozenset([0]), frozenset([128])}
    shares = [(Mask(ratio=0.6, patch_px=2)(GREY, np.random.default_rng(seed)) == 0).mean() for seed in range(9)]
    assert np.mean(shares) == pytest.approx(0.6, abs=0.01)
    assert Mask(ratio=1.0, patch_px=50)(GREY, np.random.default_rng(0)).shape == GREY.shape


def test_a_picture_is_changed_when_it_is_opened_and_by_its_seed() -> None:
    def opened(*seed: int) -> np.ndarray:
        view = SeededAugmentation(change=Noise(step=400), seed=seed)
        return np.asarray(from_array(ImageRef(source=GREY, change=view)))

    assert np.array_equal(opened(1, 2), opened(1, 2))
    assert not np.array_equal(opened(1, 2), opened(1, 3))
    assert np.array_equal(from_array(ImageRef(source=GREY)), GREY)
