"""The parts of a policy-gradient algorithm: its loss, advantage, KL penalty and what it does to groups and rewards.

Each union is a choice of formula, and each section holds the settings of that formula alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from fovea.config.base import (
    Fraction,
    MayChange,
    Member,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnion,
    PositiveFloat,
    PositiveInt,
    Section,
)

UpperClip: TypeAlias = Annotated[float, Field(ge=0, le=1e9)]
"""1e9 clips nothing, since ratios are at most exp(20)."""
GateSteepness: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]


Coupling: TypeAlias = Literal["always", "off-policy", "never"]


class LossSettings(Member):
    """Settings of a policy loss."""

    couples_tokens: ClassVar[Coupling] = "always"
    """When the loss of a token depends on the log-probs of other tokens. Where it does not, its gradient is made with
    the logits, a chunk of a row at a time; where it does, logits are computed again in the backward pass. "off-policy":
    not while the old log-probs are the present ones."""


class ClippedLoss(LossSettings):
    """PPO's ratio of each token, clipped."""

    couples_tokens = "never"
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {"clip_epsilon": ("clip_low", "clip_high")}

    name: Literal["clip"] = "clip"
    clip_low: Fraction = 0.2
    """Lower bound of the importance ratio: 1 - clip_low (`clip_epsilon` sets both bounds)."""
    clip_high: UpperClip = 0.2
    """Upper bound of the importance ratio: 1 + clip_high (DAPO: 0.28)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: bound on the loss of a token (gspo: of a completion) with a negative advantage whose ratio runs away;
    null: off."""


class GspoLoss(LossSettings):
    """GSPO: the ratio of whole completions, clipped; bounds two orders of magnitude below those of tokens."""

    # on-policy the ratio of a completion is 1, whatever its log-probs
    couples_tokens = "off-policy"
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = ClippedLoss.aliases

    name: Literal["gspo"] = "gspo"
    clip_low: Fraction = 3e-4
    """Lower bound of the length-normalised ratio of a completion: 1 - clip_low."""
    clip_high: UpperClip = 4e-4
    """Upper bound of the length-normalised ratio of a completion: 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: bound on the loss of a token (gspo: of a completion) with a negative advantage whose ratio runs away;
    null: off."""


class CispoLoss(LossSettings):
    """CISPO: REINFORCE weighted by the clipped, detached ratio, so that every token keeps a gradient."""

    couples_tokens = "never"
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = ClippedLoss.aliases

    name: Literal["cispo"] = "cispo"
    clip_low: Fraction = 0.2
    """Lower bound of the importance ratio: 1 - clip_low (`clip_epsilon` sets both bounds)."""
    clip_high: UpperClip = 0.2
    """Upper bound of the importance ratio: 1 + clip_high (DAPO: 0.28)."""


class SapoLoss(LossSettings):
    """SAPO: a sigmoid gate on the ratio in place of a clip."""

    couples_tokens = "never"
    name: Literal["sapo"] = "sapo"
    temperature_positive: GateSteepness = 1.0
    """Steepness of the gate for tokens with a positive advantage."""
    temperature_negative: GateSteepness = 1.05
    """Steepness of the gate for tokens with a negative advantage."""


LossConfig: TypeAlias = Annotated[
    ClippedLoss | GspoLoss | CispoLoss | SapoLoss | LossSettings, OpenUnion("fovea.losses", "policy_loss")
]


class Grpo(Section):
    """Reward less the group's mean, over the group's standard deviation."""

    name: Literal["grpo"] = "grpo"


class DrGrpo(Section):
    """Reward less the group's mean."""

    name: Literal["dr_grpo"] = "dr_grpo"


class Rloo(Section):
    """Reward less the mean of the other completions of the group."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(Section):
    """Return of each token, whitened over the step."""

    name: Literal["reinforce++"] = "reinforce++"


class ReinforcePlusPlusBaseline(Section):
    """Reward less the group's mean, whitened over the step."""

    name: Literal["reinforce++_baseline"] = "reinforce++_baseline"


class Critic(Section):
    """The value function of PPO."""

    trunk: Literal["shared", "detached", "separate"] = "shared"
    """Network below the value head. shared: the policy's, trained by both losses; detached: the policy's, without the
    value loss's gradient; separate: a model of its own, initialised from the policy."""
    learning_rate: MayChange[PositiveFloat | None] = None
    """Peak learning rate of the value head or the separate model; default: 20 times train.learning_rate."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which the value function alone is trained."""
    value_coef: PositiveFloat = 0.5
    """Weight of the value loss in a trunk shared with the policy; AdamW cancels it in a separate one."""
    value_clip: PositiveFloat | None = 0.5
    """PPO value clipping: largest move of a value within a step before its loss is clipped; null: off."""


class Gae(Section):
    """Generalised advantage estimation, by a value function (PPO)."""

    name: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount factor per token."""
    gae_lambda: Fraction = 1.0
    """GAE lambda: bias-variance trade-off (1 = Monte Carlo returns)."""
    critic: Critic = Field(default_factory=Critic)


AdvantageConfig: TypeAlias = Annotated[
    Grpo | DrGrpo | Rloo | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Gae, Field(discriminator="name")
]


class KlInLoss(Section):
    """KL penalty as a term of the loss."""

    name: Literal["loss"] = "loss"
    coef: PositiveFloat = 0.01
    """Weight of the KL divergence from the model that RL began with."""
    # k1's gradient is 0 on average, so that in the loss it would hold nothing
    estimator: Literal["k2", "k3", "k3+"] = "k3"
    """Estimator of the KL divergence from the log-probs of the sampled tokens (Schulman's k2, k3). k3+: the value of
    k3 with the gradient of k2, which is that of the KL divergence on average; k3's is that of the reverse one."""


class AdaptiveKl(Section):
    """Adaptive KL controller (Ziegler et al., arXiv 1909.08593): moves kl.coef until the KL is on target."""

    target: PositiveFloat
    """Mean KL divergence per token, in nats."""
    horizon_samples: PositiveInt = 10_000
    """Completions in which the coefficient can change by a fifth."""


class KlInReward(Section):
    """KL penalty taken off the reward, token by token."""

    name: Literal["reward"] = "reward"
    coef: PositiveFloat = 0.01
    """Weight of the KL divergence from the model that RL began with."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence from the log-probs of the sampled tokens (Schulman's k1, k2, k3)."""
    controller: AdaptiveKl | None = None


class DynamicSampling(Section):
    """DAPO: draw until prompts_per_step groups have both better and worse answers (by accuracy), and train on those."""

    max_gen_batches: PositiveInt = 10
    """Rollouts of one step at most; the step then trains on the groups it has."""


class Overlong(Section):
    """DAPO's soft overlong punishment: a penalty that grows over the last part of rollout.max_new_tokens."""

    buffer_frac: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of max_new_tokens, at its end, over which the penalty grows."""
    penalty_factor: NonNegativeFloat = 1.0
    """Penalty of a completion of max_new_tokens."""
