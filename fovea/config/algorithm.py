"""The settings of the policy gradient and of the value function, and what the names of papers stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from fovea.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, refuse

AlgorithmName: TypeAlias = Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++", "ppo"]
Aggregation: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

KL_IN_REWARD: Mapping[str, object] = {"kl_in": "reward", "kl_estimator": "k1"}
DEFAULTS_OF: Mapping[str, Mapping[str, object]] = {
    # DeepSeekMath, arXiv 2402.03300, with the token mean and without the KL term that most runs have left behind
    "grpo": {},
    # Liu et al., arXiv 2503.20783. No entropy bonus here and in rloo: beside advantages that are not divided by their
    # deviation, one that suits grpo outweighs the reward
    "dr_grpo": {
        "advantage": "dr_grpo",
        "aggregation": "seq-mean-token-sum-norm",
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
    },
    # Yu et al., arXiv 2503.14476: a buffer of 4,096 of 20,480 tokens
    "dapo": {
        "aggregation": "token-mean",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "dynamic_sampling": True,
        "overlong_buffer_frac": 0.2,
    },
    # Zheng et al., arXiv 2507.18071, section 5.1
    "gspo": {"loss": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # Ahmadian et al., arXiv 2402.14740: one action a completion, the KL in its reward
    "rloo": {
        "advantage": "rloo",
        "aggregation": "seq-mean-token-sum",
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_coef": 0.03,
        "entropy_coef": 0.0,
    },
    # Hu et al., arXiv 2501.03262: the KL in the reward
    "reinforce++": {"advantage": "reinforce++", **KL_IN_REWARD, "kl_coef": 0.01},
    # Schulman et al., arXiv 1707.06347 and 1506.02438; the numbers are those of vlm-gym, but for the limit on the KL:
    # four passes at a rate that was chosen for one wreck a policy without it (docs/log.md)
    "ppo": {
        "advantage": "gae",
        "ppo_epochs": 4,
        "max_policy_kl": 0.03,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "entropy_coef": 0.01,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "value_coef": 0.5,
        "value_clip": 0.5,
    },
}
"""What a name sets, unless the setting stands beside it."""


class Algorithm(Section):
    """How an episode is judged against others, and what of it is minimised. `name` gives the defaults of a paper."""

    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {"clip_epsilon": ("clip_low", "clip_high")}

    bundles: ClassVar[Mapping[str, Mapping[str, object]]] = DEFAULTS_OF
    follow_the_name: ClassVar[tuple[str, ...]] = ("dual_clip",)

    name: AlgorithmName = "grpo"
    """Sets the parts that its paper is known for (docs/algorithms.md); each can be set beside it."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "gae"] = "grpo"
    """grpo: less the group's mean, by its deviation; dr_grpo: less the mean; rloo: less the mean of the others;
    reinforce++: whitened over the step; gae: by a value function (PPO)."""
    loss: Literal["clip", "gspo", "cispo", "sapo"] = "clip"
    """clip: PPO's clipped ratio of each token; gspo: of whole completions, whose bounds are to be near 3e-4
    (name=gspo sets them); cispo, sapo: softer ends."""
    aggregation: Aggregation = "token-mean"
    """How the loss of tokens becomes one number, over the whole step whatever way it is cut."""
    clip_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_low (`clip_epsilon` sets both bounds)."""
    clip_high: NonNegativeFloat = 0.2
    """and above at 1 + clip_high (DAPO: 0.28)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on the loss of a bad token whose ratio runs away (loss=clip); null: off."""
    sapo_temperature_positive: PositiveFloat = 1.0
    """How fast loss=sapo lets go of tokens of good completions."""
    sapo_temperature_negative: PositiveFloat = 1.05
    """and of bad ones."""
    importance_sampling_fix: bool = False
    """Weigh each token by its probability in training over that in the rollout, which corrects an inexact engine."""
    importance_sampling_clip: Annotated[float, Field(ge=1)] = 2.0
    """The largest such weight; from 1 on, so that an exact engine's stay as they are."""
    importance_sampling_level: Literal["token", "sequence", "sequence_mask"] = "token"
    """token: each by its own; sequence: by the product over the completion; sequence_mask: that, and completions
    above the largest weight are left out."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the model that RL began with (0.01 is usual for VLMs); at 0 no reference model is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the KL, from the log-probs of the tokens drawn; in the reward k1 is the default."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss or taken from the reward, token by token."""
    kl_target: PositiveFloat | None = None
    """Move kl_coef until the KL of a token is this (kl_in=reward); null: leave it."""
    kl_horizon_samples: PositiveInt = 10_000
    """Completions in which kl_coef can change by a fifth."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy of the tokens trained on, aggregated as the loss is."""
    max_groups_without_signal: NonNegativeInt = 0
    """How many groups of equal rewards train along for the entropy bonus, worst first (all with a KL term, a value
    function or reinforce++, which act on them anyway)."""
    dynamic_sampling: bool = False
    """Draw until prompts_per_step groups have answers both better and worse (by accuracy), and train on those."""
    max_gen_batches: PositiveInt = 10
    """At most this many rollouts for a step; then it trains on what there is."""
    overlong_buffer_frac: Fraction = 0.0
    """Share of max_new_tokens, at its end, in which a completion loses reward the longer it gets; 0: none."""
    overlong_penalty_factor: NonNegativeFloat = 1.0
    """What one of max_new_tokens loses."""
    ppo_epochs: PositiveInt = 1
    """Passes over the completions of a step."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    max_policy_kl: PositiveFloat | None = None
    """End the passes of a step once the policy is this far (k3, mean over tokens) from where the step began."""
    gamma: Fraction = 1.0
    """Discount per token (advantage=gae)."""
    gae_lambda: Fraction = 1.0
    """Trust in rewards over the value function (advantage=gae)."""
    value_coef: PositiveFloat = 0.5
    """Weight of the value loss in a trunk that it shares with the policy (advantage=gae); AdamW undoes it elsewhere."""
    value_clip: PositiveFloat | None = 0.5
    """How far a value may move from where the step began before its loss is clipped (advantage=gae); null: off."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_paper(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        paper = DEFAULTS_OF.get(str(given.get("name")), {})
        # what only the clipped loss has is off beside another one
        unused: dict[str, object] = {}
        if given.get("loss", paper.get("loss", "clip")) != "clip":
            unused["dual_clip"] = None
        if given.get("kl_in", paper.get("kl_in")) == "reward":
            unused["kl_estimator"] = "k1"
        return {**unused, **paper, **given}

    @model_validator(mode="after")
    def _parts_fit(self) -> Algorithm:
        refuse(_contradictions(self))
        return self

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether rewards become advantages with the help of log-probs from before the update."""
        return bool(self.kl_coef and self.kl_in == "reward")

    @property
    def needs_values(self) -> bool:
        """Whether a value function is trained beside the policy."""
        return self.advantage == "gae"


class Critic(Section):
    """The value function of PPO (algorithm.advantage=gae)."""

    trunk: Literal["shared", "separate"] = "shared"
    """shared: a head on the policy's last hidden state; separate: a model of its own, begun as a copy of the policy."""
    learning_rate: PositiveFloat | None = None
    """Peak rate of AdamW for the head, or for the model of its own; default: 20 times train.learning_rate."""
    detach_trunk: bool = False
    """Keep the value loss out of a shared trunk: it trains the head only."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the value function is trained."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Critic:
        if self.detach_trunk and self.trunk == "separate":
            raise ValueError(
                "critic.detach_trunk=true keeps the value loss out of a shared trunk, but critic.trunk=separate shares "
                "none; set critic.trunk=shared, or critic.detach_trunk=false"
            )
        return self


def _contradictions(settings: Algorithm) -> Iterator[str]:
    """Parts of an algorithm that cannot work together, and what would."""
    if settings.loss != "clip" and settings.dual_clip is not None:
        yield f"algorithm.dual_clip is part of loss=clip, but loss={settings.loss}; set algorithm.dual_clip=null"
    of_tokens = settings.needs_values or (settings.advantage == "reinforce++" and settings.needs_old_logprobs)
    if settings.loss == "gspo" and of_tokens:
        where = "" if settings.needs_values else " with a KL in the reward"
        yield (
            f"algorithm.loss=gspo weighs whole completions, but advantage={settings.advantage}{where} gives every "
            "token an advantage of its own; set algorithm.loss=clip"
        )
    if settings.kl_target is not None and (settings.kl_in != "reward" or not settings.kl_coef):
        yield (
            f"algorithm.kl_target={settings.kl_target:g} moves the weight of a KL in the reward, but kl_in="
            f"{settings.kl_in} and kl_coef={settings.kl_coef:g}; set kl_in=reward with a kl_coef, or kl_target=null"
        )
    if settings.kl_coef and settings.kl_in == "loss" and settings.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator=k1 in the loss has a gradient of 0 on average and would hold nothing; "
            "set algorithm.kl_estimator=k3, or algorithm.kl_in=reward"
        )
    yield from _without_use(settings)


def _without_use(settings: Algorithm) -> Iterator[str]:
    """Settings that somebody has changed and nothing reads."""
    paper = DEFAULTS_OF[settings.name]
    for is_read, keys, why in _readers(settings):
        for key in () if is_read else keys.split():
            value, default = getattr(settings, key), Algorithm.model_fields[key].default
            if value not in (default, paper.get(key, default)):
                yield f"algorithm.{key}={value} {why}, or algorithm.{key}={'null' if default is None else default}"


def _readers(settings: Algorithm) -> tuple[tuple[bool, str, str], ...]:
    """Whether something reads these keys, and if not: why, and what would."""
    return (
        (
            settings.needs_values,
            "gamma gae_lambda value_coef value_clip",
            f"is of PPO, but advantage={settings.advantage} has no value function; set algorithm.name=ppo",
        ),
        (
            settings.importance_sampling_fix,
            "importance_sampling_clip importance_sampling_level",
            "shapes weights that importance_sampling_fix=false leaves out; set algorithm.importance_sampling_fix=true",
        ),
        (
            settings.loss != "sapo",
            "clip_low clip_high",
            "is a bound, but loss=sapo has none; set sapo_temperature_positive and _negative",
        ),
        (
            settings.loss == "sapo",
            "sapo_temperature_positive sapo_temperature_negative",
            f"is of loss=sapo, but loss={settings.loss}; set algorithm.loss=sapo",
        ),
        (
            settings.dynamic_sampling,
            "max_gen_batches",
            "bounds the rollouts of dynamic sampling, which is off; set algorithm.dynamic_sampling=true",
        ),
        (
            settings.overlong_buffer_frac > 0,
            "overlong_penalty_factor",
            "scales a penalty that overlong_buffer_frac=0 leaves out; set algorithm.overlong_buffer_frac",
        ),
        (
            settings.kl_target is not None,
            "kl_horizon_samples",
            "paces a kl_coef that kl_target=null leaves alone; set algorithm.kl_target",
        ),
        (
            settings.kl_coef > 0,
            "kl_in kl_estimator",
            "says what the KL is and where it stands, but kl_coef=0 leaves it out; set algorithm.kl_coef",
        ),
        (
            settings.ppo_epochs > 1 or settings.minibatches > 1,
            "max_policy_kl",
            "ends the passes of a step, of which there is one; set algorithm.ppo_epochs or algorithm.minibatches",
        ),
    )
