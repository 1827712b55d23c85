"""Settings of augmentations: pictures that are changed for some completions of a group, or for a term of the loss."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fovea_gym.settings.base import Coefficient, CoefficientOrZero, Fraction, PositiveFloat, PositiveInt, Section

Share: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


class NoisyPictures(Section):
    """NoisyRollout: draw some completions of every group on noisy pictures; all train on the clean ones."""

    share: Share = 0.5
    """Share of rollout.samples_per_prompt that is drawn on noisy pictures."""
    noise_step: Annotated[int, Field(ge=0, lt=1000)] = 500
    """Step, of 1000, of the diffusion process whose Gaussian noise is added; 500 leaves outlines."""
    decay_steepness: PositiveFloat | None = 30.0
    """Noise falls as 1 - sigmoid(decay_steepness * (step - decay_mid_step) / max_steps) of noise_step; null: not."""
    decay_mid_step: PositiveInt = 40
    """Training step at which half of noise_step is left."""

    def num_sampled(self, samples_per_prompt: int) -> int:
        """Completions of a group that are drawn on noisy pictures."""
        return round(self.share * samples_per_prompt)


class MaskedPictures(Section):
    """A second copy of every picture, with random square patches black."""

    mask_ratio: Fraction = 0.6
    """Probability with which a patch is black."""
    mask_patch_px: PositiveInt = 14
    """Side of a patch, in pixels of the picture as it is read."""
    entropy_penalty: CoefficientOrZero = 0.0
    """Weight of the mean of -log p over the tokens, an estimate of the entropy, in the loss."""


class Papo(MaskedPictures):
    """PAPO: raise the KL divergence from the policy on the clean picture to that on the masked one."""

    name: Literal["papo"] = "papo"
    coef: Coefficient = 0.01
    """Weight of the KL divergence (k3), which is taken off the loss."""
    masked_entropy_penalty: CoefficientOrZero = 0.0
    """Weight of the same mean as entropy_penalty, of log-probs on the masked picture."""


class Vppo(MaskedPictures):
    """VPPO: train on the tokens that depend most on the picture, and more on completions that depend more on it."""

    name: Literal["vppo"] = "vppo"
    mask_ratio: Fraction = 0.5
    """Probability with which a patch is black."""
    entropy_penalty: CoefficientOrZero = 0.06
    """Weight of the mean of -log p over the tokens, an estimate of the entropy, in the loss."""
    token_share: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of a completion's tokens in the policy loss: the tokens whose log-prob the mask changes most."""
    min_scale: Fraction = 0.9
    """Factor of the advantages of the completion that depends least on the picture; the mean factor is 1."""


AugmentationTerm: TypeAlias = Annotated[Papo | Vppo, Field(discriminator="name")]
