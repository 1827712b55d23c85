"""The settings of the policy gradient; `fovea.config.papers` has what the names of papers stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from fovea.config.algorithm_parts import (
    AdvantageConfig,
    ClippedLoss,
    Critic,
    DynamicSampling,
    Gae,
    Grpo,
    KlInLoss,
    KlInReward,
    LossConfig,
    Overlong,
)
from fovea.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Tree,
    long_forms,
    over,
    refuse,
)
from fovea.config.papers import DEFAULTS_OF

AlgorithmName: TypeAlias = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++", "reinforce++_baseline", "ppo"
]
Aggregation: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class Algorithm(Section):
    """The policy-gradient algorithm: how rewards become advantages and advantages a loss."""

    bundles: ClassVar[Mapping[str, Tree]] = DEFAULTS_OF

    name: AlgorithmName = "grpo"
    """Published algorithm whose settings are the defaults (docs/algorithms.md); each can be set beside it."""
    advantage: AdvantageConfig = Field(default_factory=Grpo)
    loss: LossConfig = Field(default_factory=ClippedLoss)
    aggregation: Aggregation = "token-mean"
    """Reduction of the token losses to one number, over the whole step whatever micro-batches it is cut into."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Old log-probs, to which the loss takes and clips its ratio: the trainer's before the update, or those that the
    engine drew with, which bounds what older weights and the update change together. With rollout.max_staleness_steps
    the default is engine, unless importance_sampling_fix=true."""
    importance_sampling_fix: bool = False
    """Importance-sampling correction for an engine whose probabilities differ from the trainer's: weigh each token by
    the ratio of the two."""
    importance_sampling_clip: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight; 1 or more, so that an exact engine's weights stay 1."""
    importance_sampling_level: Literal["token", "sequence", "sequence_mask"] = "token"
    """Unit of the importance weight. token: its own ratio; sequence: the product over the completion; sequence_mask:
    that, and completions above the largest weight are left out."""
    kl: Annotated[KlInLoss | KlInReward, Field(discriminator="name")] | None = None
    """KL penalty to the model that RL began with (coef 0.01 is usual for VLMs); null: none, and no reference model."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, aggregated as the loss is."""
    max_groups_without_signal: NonNegativeInt = 0
    """Groups of equal rewards that train along for the entropy bonus, lowest reward first (all of them with a KL
    penalty, a value function or reinforce++, which act on them anyway)."""
    dynamic_sampling: DynamicSampling | None = None
    overlong: Overlong | None = None
    mask_truncated: bool = False
    """Overlong filtering: leave completions that were cut at rollout.max_new_tokens out of the loss; their rewards stay
    in the baseline of their group."""
    ppo_epochs: PositiveInt = 1
    """Passes over the completions of a step."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    max_policy_kl: PositiveFloat | None = None
    """Early stopping of the passes of a step, after its first optimizer step: largest KL divergence (k3, mean over
    tokens) from the old log-probs; null: none."""

    @classmethod
    def completed(cls, given: Tree) -> Tree:
        """The settings as given, over the defaults of the paper that `name` names."""
        paper = cls.bundles.get(str(given.get("name")), {})
        return super().completed(over(long_forms(cls, paper), long_forms(cls, given)))

    @model_validator(mode="after")
    def _parts_fit(self) -> Algorithm:
        refuse(_contradictions(self))
        return self

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether turning rewards into advantages takes log-probs from before the update."""
        return isinstance(self.kl, KlInReward)

    @property
    def corrects_for_engine(self) -> bool:
        """Whether the loss accounts for completions of other probabilities than the trainer's before the update."""
        return self.importance_sampling_fix or self.old_logprobs == "engine"

    @property
    def critic(self) -> Critic | None:
        """The settings of the value function; None where the advantage needs none."""
        return self.advantage.critic if isinstance(self.advantage, Gae) else None


def _contradictions(settings: Algorithm) -> Iterator[str]:
    """Parts of an algorithm that cannot work together or that nothing reads, and what would."""
    advantage, defaults = settings.advantage.name, Algorithm.model_fields
    of_tokens = advantage == "gae" or (advantage == "reinforce++" and settings.needs_old_logprobs)
    if settings.loss.name == "gspo" and of_tokens:
        where = "" if advantage == "gae" else " with a KL in the reward"
        yield (
            f"algorithm.loss=gspo weighs whole completions, but advantage={advantage}{where} gives every "
            "token an advantage of its own; set algorithm.loss=clip"
        )
    if settings.importance_sampling_fix and settings.old_logprobs == "engine":
        yield (
            "algorithm.importance_sampling_fix=true weighs tokens by the old log-probs over the engine's, which "
            "algorithm.old_logprobs=engine makes the same; leave either out"
        )
    for key in () if settings.importance_sampling_fix else ("importance_sampling_clip", "importance_sampling_level"):
        if getattr(settings, key) != defaults[key].default:
            yield (
                f"algorithm.{key}={getattr(settings, key)} shapes weights that importance_sampling_fix=false leaves "
                f"out; set algorithm.importance_sampling_fix=true, or algorithm.{key}={defaults[key].default}"
            )
    one_step = settings.ppo_epochs * settings.minibatches == 1
    if one_step and settings.max_policy_kl not in (None, settings.bundles[settings.name].get("max_policy_kl")):
        yield (
            f"algorithm.max_policy_kl={settings.max_policy_kl} ends the passes of a step, of which there is one; set "
            "algorithm.ppo_epochs or algorithm.minibatches, or algorithm.max_policy_kl=null"
        )
