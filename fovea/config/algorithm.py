"""Settings of the policy-gradient algorithm, and the settings that the name of a published algorithm stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from fovea.config.augmentations import AugmentationTerm, Vppo
from fovea_gym.settings.base import (
    Coefficient,
    CoefficientOrZero,
    Fraction,
    LearningRate,
    MayChange,
    Member,
    NonNegativeInt,
    OpenUnion,
    PositiveFloat,
    PositiveInt,
    Section,
    Tree,
    long_forms,
    over,
)

UpperClip: TypeAlias = Annotated[float, Field(ge=0, le=1e9)]
"""1e9 clips nothing, since ratios are at most exp(20)."""
GateSteepness: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
Coupling: TypeAlias = Literal["always", "off-policy", "never"]


class LossSettings(Member):
    """Settings of a policy loss."""

    couples_tokens: ClassVar[Coupling] = "always"
    """When the loss of a token depends on the log-probs of other tokens. If it does not, its gradient is computed with
    the logits, one chunk of a row at a time; if it does, the backward pass computes the logits again. "off-policy":
    only if the old log-probs differ from the current ones."""


class RatioBounds(LossSettings):
    """Bounds of the importance ratio of each token."""

    couples_tokens = "never"
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {"clip_epsilon": ("clip_low", "clip_high")}

    clip_low: Fraction = 0.2
    """Lower bound of the importance ratio: 1 - clip_low (`clip_epsilon` sets both bounds)."""
    clip_high: UpperClip = 0.2
    """Upper bound of the importance ratio: 1 + clip_high (DAPO: 0.28)."""


class ClippedLoss(RatioBounds):
    """PPO: the clipped ratio of each token."""

    name: Literal["clip"] = "clip"
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: bound on the loss of a token (gspo: completion) with negative advantage and large ratio; null: off."""


class GspoLoss(LossSettings):
    """GSPO: the clipped ratio of whole completions; its bounds are two orders of magnitude below those for tokens."""

    # on-policy, the ratio of a completion is always 1
    couples_tokens = "off-policy"
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = RatioBounds.aliases

    name: Literal["gspo"] = "gspo"
    clip_low: Fraction = 3e-4
    """Lower bound of the length-normalised ratio of a completion: 1 - clip_low."""
    clip_high: UpperClip = 4e-4
    """Upper bound of the length-normalised ratio of a completion: 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: bound on the loss of a token (gspo: completion) with negative advantage and large ratio; null: off."""


class CispoLoss(RatioBounds):
    """CISPO: REINFORCE weighted by the clipped, detached ratio, so that every token keeps a gradient."""

    name: Literal["cispo"] = "cispo"


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
    """Reward minus the group's mean, divided by the group's standard deviation."""

    name: Literal["grpo"] = "grpo"


class DrGrpo(Section):
    """Reward minus the group's mean."""

    name: Literal["dr_grpo"] = "dr_grpo"


class Rloo(Section):
    """Reward minus the mean of the other completions of the group."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(Section):
    """Return of each token, whitened over the step."""

    name: Literal["reinforce++"] = "reinforce++"


class ReinforcePlusPlusBaseline(Section):
    """Reward minus the group's mean, whitened over the step."""

    name: Literal["reinforce++_baseline"] = "reinforce++_baseline"


class Critic(Section):
    """The value function of PPO."""

    trunk: Literal["shared", "detached", "separate"] = "shared"
    """Network below the value head. shared: the policy's, trained by both losses; detached: the policy's, without the
    value loss's gradient; separate: a separate model, initialised from the policy."""
    learning_rate: MayChange[LearningRate | None] = None
    """Peak learning rate of the value head or the separate model; default: 20 times train.learning_rate."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps in which only the value function is trained."""
    value_coef: Coefficient = 0.5
    """Weight of the value loss in a trunk shared with the policy; it has no effect on a separate model (AdamW)."""
    value_clip: PositiveFloat | None = 0.5
    """PPO value clipping: largest move of a value within a step before its loss is clipped; null: off."""


class Gae(Section):
    """Generalised advantage estimation, with a value function (PPO)."""

    name: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount factor per token."""
    gae_lambda: Fraction = 1.0
    """GAE lambda: bias-variance trade-off (1 = Monte Carlo returns)."""
    turn_lambda: Fraction | None = None
    """Bi-level GAE (VAGEN): lambda of GAE over the turns of an episode, whose gamma is algorithm.turn_discount; gamma
    and gae_lambda then apply within a turn. null: one GAE over the tokens of all turns."""
    critic: Critic = Field(default_factory=Critic)


AdvantageConfig: TypeAlias = Annotated[
    Grpo | DrGrpo | Rloo | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Gae, Field(discriminator="name")
]


class KlInLoss(Section):
    """KL penalty as a term of the loss."""

    name: Literal["loss"] = "loss"
    coef: Coefficient = 0.01
    """Weight of the KL divergence from the model that RL began with."""
    # without k1, whose gradient is 0 on average: it would have no effect in the loss
    estimator: Literal["k2", "k3", "k3+"] = "k3"
    """Estimator of the KL divergence from the log-probs of the sampled tokens (Schulman's k2, k3). k3+: the value of k3
    with the gradient of k2, which is on average that of the KL divergence; the gradient of k3 is that of the reverse KL
    divergence."""


class AdaptiveKl(Section):
    """Adaptive KL controller (Ziegler et al., arXiv 1909.08593): adjusts kl.coef to keep the KL on target."""

    target: PositiveFloat
    """Mean KL divergence per token, in nats."""
    horizon_samples: PositiveInt = 10_000
    """Number of completions over which the coefficient can change by a fifth."""


class KlInReward(Section):
    """KL penalty subtracted from the reward, token by token."""

    name: Literal["reward"] = "reward"
    coef: Coefficient = 0.01
    """Weight of the KL divergence from the model that RL began with."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence from the log-probs of the sampled tokens (Schulman's k1, k2, k3)."""
    controller: AdaptiveKl | None = None


class DynamicSampling(Section):
    """DAPO: sample until prompts_per_step groups have both better and worse answers (by accuracy); train on those."""

    max_gen_batches: Annotated[int, Field(ge=1, le=1000)] = 10
    """Most rollouts in one step; the step then trains on the groups it has."""


class Overlong(Section):
    """DAPO's soft overlong punishment: a penalty that grows over the last part of rollout.max_new_tokens."""

    buffer_frac: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of max_new_tokens, at its end, over which the penalty grows."""
    penalty_factor: CoefficientOrZero = 1.0
    """Penalty for a completion of max_new_tokens."""


DEFAULTS_OF: dict[str, Tree] = {
    # DeepSeekMath, arXiv 2402.03300, with the token mean and without the KL term that most runs have dropped
    "grpo": {},
    # Liu et al., arXiv 2503.20783. No entropy bonus here and in rloo: where advantages are not divided by their
    # deviation, a bonus that suits grpo outweighs the reward
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm", "kl": None, "entropy_coef": 0.0},
    # Yu et al., arXiv 2503.14476: a buffer of 4,096 of 20,480 tokens
    "dapo": {
        "aggregation": "token-mean",
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "kl": None,
        "dynamic_sampling": True,
        "overlong": {"buffer_frac": 0.2},
    },
    # Zheng et al., arXiv 2507.18071, section 5.1
    "gspo": {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
    # Ahmadian et al., arXiv 2402.14740: a completion is one action, with the KL in its reward
    "rloo": {
        "advantage": "rloo",
        "aggregation": "seq-mean-token-sum",
        "kl": {"name": "reward", "coef": 0.03},
        "entropy_coef": 0.0,
    },
    # Hu et al., arXiv 2501.03262: the KL in the reward
    "reinforce++": {"advantage": "reinforce++", "kl": {"name": "reward", "coef": 0.01}},
    # the same paper's variant for several answers per prompt: k2 in the loss
    "reinforce++_baseline": {
        "advantage": "reinforce++_baseline",
        "kl": {"name": "loss", "coef": 0.01, "estimator": "k2"},
    },
    # Schulman et al., arXiv 1707.06347 and 1506.02438; the numbers are those of vlm-gym, except for the limit on the
    # KL: without it, four passes at a rate that was chosen for one wreck a policy (docs/log.md)
    "ppo": {
        "advantage": {"name": "gae", "gamma": 0.99, "gae_lambda": 0.95},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2},
        "ppo_epochs": 4,
        "max_policy_kl": 0.03,
        "entropy_coef": 0.01,
    },
}
"""The settings of `algorithm` that a name stands for; settings that are given as well win."""
AlgorithmName: TypeAlias = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++", "reinforce++_baseline", "ppo"
]
Aggregation: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class Algorithm(Section):
    """The policy-gradient algorithm: how rewards become advantages and advantages a loss."""

    bundles: ClassVar[Mapping[str, Tree]] = DEFAULTS_OF

    name: AlgorithmName = "grpo"
    """Published algorithm whose settings are the defaults (docs/algorithms.md); each of them can be changed."""
    advantage: AdvantageConfig = Field(default_factory=Grpo)
    loss: LossConfig = Field(default_factory=ClippedLoss)
    aggregation: Aggregation = "token-mean"
    """Reduction of the token losses to one number, over the whole step, regardless of its micro-batches."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Old log-probs of the ratio that the loss clips: the trainer's before the update, or those with which the engine
    sampled, which bounds the change by older weights and by the update together. With rollout.max_staleness_steps the
    default is engine, unless importance_sampling_fix=true."""
    importance_sampling_fix: bool = False
    """Importance-sampling correction: weight each token by the ratio of the trainer's probability to the engine's."""
    importance_sampling_clip: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight; 1 or more, so that an exact engine's weights stay 1."""
    importance_sampling_level: Literal["token", "sequence", "sequence_mask"] = "token"
    """Unit of the importance weight. token: its own ratio; sequence: the product over the completion; sequence_mask:
    the same, but completions above the largest weight are left out."""
    kl: Annotated[KlInLoss | KlInReward, Field(discriminator="name")] | None = None
    """KL penalty to the model that RL began with (coef 0.01 is usual for VLMs); null: none, and no reference model."""
    augmentation: AugmentationTerm | None = None
    """Loss term from a second, masked view of every picture; null: none."""
    entropy_coef: CoefficientOrZero = 0.0
    """Weight of the entropy bonus, aggregated as the loss is."""
    max_groups_without_signal: NonNegativeInt = 0
    """Number of groups with equal rewards that are trained on for the entropy bonus, lowest reward first (with a KL
    penalty, a value function or reinforce++, all of them are trained on anyway)."""
    dynamic_sampling: DynamicSampling | None = None
    overlong: Overlong | None = None
    mask_truncated: bool = False
    """Overlong filtering (DAPO) and over-turn masking (Mini-o3): leave completions that were cut at
    rollout.max_new_tokens, and episodes that ended at a limit of turns or tokens, out of the loss; their rewards stay
    in the baseline of their group. false: train on them with their score."""
    turn_discount: Fraction = 1.0
    """Discount factor per turn of rewards that are given by turn (docs/turns.md); 1: add them up."""
    ppo_epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of passes over the completions of a step."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    max_policy_kl: PositiveFloat | None = None
    """Largest KL divergence (k3, mean over tokens) from the old log-probs: above it a step ends its passes early, but
    not before its first optimizer step. null: no limit."""

    @classmethod
    def completed(cls, given: Tree) -> Tree:
        """The given settings, over the defaults of the paper that `name` stands for."""
        paper = cls.bundles.get(str(given.get("name")), {})
        return super().completed(over(long_forms(cls, paper), long_forms(cls, given)))

    @property
    def needs_old_logprobs(self) -> bool:
        """True if computing advantages from rewards needs log-probs from before the update."""
        return isinstance(self.kl, KlInReward) or isinstance(self.augmentation, Vppo)

    @property
    def corrects_for_engine(self) -> bool:
        """True if the loss corrects for completions sampled with other probabilities than the trainer's."""
        return self.importance_sampling_fix or self.old_logprobs == "engine"

    @property
    def compares(self) -> bool:
        """True if an episode can be trained on only in comparison with others of its prompt."""
        return self.dynamic_sampling is not None or not isinstance(self.advantage, Gae | ReinforcePlusPlus)

    @property
    def critic(self) -> Critic | None:
        """The settings of the value function; None if the advantage does not need one."""
        return self.advantage.critic if isinstance(self.advantage, Gae) else None

    def contradictions(self) -> Iterator[str]:
        """Yield an error text for settings that cannot work together and for settings without effect."""
        advantage, defaults = self.advantage.name, type(self).model_fields
        of_tokens = advantage == "gae" or (advantage == "reinforce++" and isinstance(self.kl, KlInReward))
        if self.loss.name == "gspo" and of_tokens:
            where = "" if advantage == "gae" else " with a KL in the reward"
            yield (
                f"algorithm.loss=gspo weights whole completions, but advantage={advantage}{where} gives every "
                "token a separate advantage; set algorithm.loss=clip"
            )
        if self.importance_sampling_fix and self.old_logprobs == "engine":
            yield (
                "algorithm.importance_sampling_fix=true weights tokens by the old log-probs over the engine's, which "
                "algorithm.old_logprobs=engine makes equal; leave one of the two out"
            )
        for key in () if self.importance_sampling_fix else ("importance_sampling_clip", "importance_sampling_level"):
            if getattr(self, key) != defaults[key].default:
                yield (
                    f"algorithm.{key}={getattr(self, key)} has no effect with importance_sampling_fix=false; "
                    f"set algorithm.importance_sampling_fix=true, or algorithm.{key}={defaults[key].default}"
                )
        if isinstance(self.advantage, Gae) and self.advantage.turn_lambda is None and self.turn_discount != 1:
            yield (
                f"algorithm.turn_discount={self.turn_discount} discounts from turn to turn, but advantage=gae without "
                "turn_lambda discounts from token to token only; set algorithm.advantage.turn_lambda=0.95, or "
                "algorithm.turn_discount=1"
            )
        one_step = self.ppo_epochs * self.minibatches == 1
        if one_step and self.max_policy_kl not in (None, self.bundles[self.name].get("max_policy_kl")):
            yield (
                f"algorithm.max_policy_kl={self.max_policy_kl} ends the passes of a step early, but there is only one; "
                "raise algorithm.ppo_epochs or algorithm.minibatches, or set algorithm.max_policy_kl=null"
            )
