"""Settings of augmentations: pictures that are changed for some completions of a group, or for a term of the loss."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fovea_gym.settings.base import Coefficient, CoefficientOrZero, Fraction, PositiveFloat, PositiveInt, Section

Share: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


class NoisyPictures(Section):
    """NoisyRollout: sample some completions of every group on noisy pictures; all are trained on the clean ones."""

    share: Share = 0.5
    """Share of rollout.samples_per_prompt that is sampled on noisy pictures."""
    noise_step: Annotated[int, Field(ge=0, lt=1000)] = 500
    """Step (of 1000) of the diffusion process whose Gaussian noise is added; at 500, outlines remain."""
    decay_steepness: PositiveFloat | None = 30.0
    """noise_step is multiplied by 1 - sigmoid(decay_steepness * (step - decay_mid_step) / max_steps); null: never."""
    decay_mid_step: PositiveInt = 40
    """Training step at which noise_step has fallen to half."""

    def num_sampled(self, samples_per_prompt: int) -> int:
        """Number of completions of a group that are sampled on noisy pictures."""
        return round(self.share * samples_per_prompt)


class MaskedPictures(Section):
    """A second copy of every picture, with random black square patches."""

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
    """Weight of the KL divergence (k3), which is subtracted from the loss."""
    masked_entropy_penalty: CoefficientOrZero = 0.0
    """As entropy_penalty, but for log-probs on the masked picture."""


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
