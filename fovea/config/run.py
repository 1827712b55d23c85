"""The one tree of settings: typed, strict, units in names. Imports no torch, so that it loads in a blink.

Precedence: the defaults below < recipe files, left to right < `key.sub=value` on the command line
(`fovea.config.loading`). A setting is stored once; nothing writes to the tree after it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fovea.config.algorithm import Algorithm, KlInReward
from fovea.config.backends import EmbeddedEngine, EngineUse, VllmServersEngine
from fovea.config.base import (
    FiniteFloat,
    MayChange,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Tree,
    refuse,
)
from fovea.config.environments import (
    Curriculum,
    EnvironmentConfig,
    Geo3kEnvironment,
    MixtureEnvironment,
    PartEnvironment,
    RowsEnvironment,
    ShapesEnvironment,
    VqaEnvironment,
)
from fovea.config.megatron_checks import megatron_complaints
from fovea.config.model import Model
from fovea.config.rewards import RewardPlace, list_complaints, process_complaints, reward_tuple
from fovea.config.sections import (
    Checkpoint,
    Cluster,
    Data,
    Evaluate,
    Log,
    ModelReward,
    Parity,
    Plan,
    Rollout,
    SecondOpinion,
    Train,
    Warmup,
)
from fovea.config.splits import SplitFiles

NAME, TIME = "{name}", "{time}"
"""Placeholders in `run_dir`."""


class Config(Section):
    """All settings of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Random seed of weights, data order and sampling."""
    run_dir: MayChange[Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]] = f"runs/{NAME}-{TIME}"
    """Output folder of the run: config, metrics, samples, checkpoints, report. {name} is environment.name; with {time},
    every run gets a separate folder, and runs/latest leads to it."""
    max_steps: MayChange[PositiveInt] = 1000
    """Number of RL steps; fewer where max_epochs ends the run before."""
    max_epochs: MayChange[PositiveInt | None] = None
    """Epochs after which a run ends, if max_steps does not end it before: each takes every training row exactly once,
    and the last step the rows that are left. Default: rows are drawn by question type, without an end."""
    max_hours: MayChange[PositiveFloat | None] = None
    """Hours since this command began the run, a resumed one counting anew, after which it ends with its step, saved, to
    go on with resume=auto: the time limit of a scheduler, less that of a step. Default: no limit."""
    max_restarts: MayChange[NonNegativeInt] = 0
    """Restarts by `fovea train` from the last checkpoint after a death (killed, crashed, out of memory, a worker lost),
    without a new checkpoint in between, which gives all of them back; 0: none (docs/faults.md)."""
    resume: MayChange[Literal["never", "auto"] | str] = "never"
    """Start anew, or (auto) resume from the newest checkpoint in run_dir, if there is one, or from the checkpoint whose
    folder is named, such as runs/x/checkpoints/step-100: of the run in run_dir, or of another one for a new run_dir."""
    resume_changed: MayChange[Literal["error", "allow"]] = "error"
    """Handling of rows, your own code, model files or libraries that are not those that the checkpoint was made
    with: stop and name them, or go on with what is there now."""
    threads: MayChange[PositiveInt | None] = None
    """CPU threads of torch; default: torch's own choice."""
    profile: MayChange[bool] = False
    """Profile a few steps into profile/ of the run folder: phases, operators, a trace of one step."""
    model: Model
    environment: EnvironmentConfig = Field(default_factory=ShapesEnvironment)
    reward: str | tuple[str, ...] | None = None
    """Your own reward function, `path/to/file.py:function`, or a list of them, in place of the environment's score
    (docs/own.md). A run that was given a function by Python code has `python:module.name` here."""
    reward_weights: tuple[FiniteFloat, ...] | None = None
    """Weights of a list of rewards, in their order; the reward is the weighted sum. Default: 1 each."""
    reward_timeout_seconds: PositiveFloat = 10.0
    """Time limit for one call of your own reward function (of a list: of all of them together), or of your own
    environment's score."""
    reward_on_failure: Literal["error", "drop"] = "error"
    """Handling of such a call that raises, is late or returns no number: stop, or drop the group
    (`groups/unscored`)."""
    reward_calls_at_once: PositiveInt = 1
    """Concurrent calls, in as many threads (more than 1 only for thread-safe code) or processes."""
    reward_in: MayChange[RewardPlace] = "thread"
    """Threads of the run, or processes, for calls of reward functions that are named by their files. A process is
    killed when its call is late, and started again, also where the call holds the interpreter lock (docs/own.md)."""
    model_reward: ModelReward | None = None
    second_opinion: SecondOpinion | None = None
    curriculum: Curriculum = Field(default_factory=Curriculum)
    data: Data = Field(default_factory=Data)
    warmup: Warmup | None = None
    rollout: Rollout = Field(default_factory=Rollout)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    train: Train = Field(default_factory=Train)
    evaluate: MayChange[Evaluate] = Field(default_factory=Evaluate)
    parity: MayChange[Parity] = Field(default_factory=Parity)
    cluster: MayChange[Cluster] = Field(default_factory=Cluster)
    checkpoint: MayChange[Checkpoint] = Field(default_factory=Checkpoint)
    log: MayChange[Log] = Field(default_factory=Log)
    plan: MayChange[Plan] = Field(default_factory=Plan)

    @property
    def expands_segments(self) -> bool:
        """True if torch may allocate GPU memory in segments that grow.

        Not beside an engine that opens tensors of this process by CUDA IPC (SGLang, or any in another environment), for
        which segments must not move, nor beside vLLM, which allocates in a separate pool in this process.
        """
        engine = self.rollout.engine
        by_files = isinstance(engine, VllmServersEngine) and engine.python is None
        return self.model.device != "cpu" and (by_files or isinstance(engine, EmbeddedEngine))

    @property
    def copies_reference(self) -> bool:
        """True if the KL term needs a copy of the model that RL begins with.

        With LoRA, switching the adapters off gives that model, unless they did something before RL began.
        """
        lora = self.model.lora
        adapters_off_is_the_start = lora is not None and lora.adapter is None and self.warmup is None
        return self.algorithm.kl is not None and not adapters_off_is_the_start

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint that `resume` names; None for never and auto."""
        return None if self.resume in ("never", "auto") else Path(self.resume).expanduser()

    @property
    def environments(self) -> dict[str, PartEnvironment]:
        """The environment, or those of the parts of a mixture, by dotted key."""
        if not isinstance(self.environment, MixtureEnvironment):
            return {"environment": self.environment}
        return {
            f"environment.parts.{name}.environment": part.environment
            for name, part in self.environment.parts.by_name.items()
        }

    @property
    def rewards(self) -> dict[str, tuple[str, ...]]:
        """The user's own reward functions, of the run and of the parts of a mixture, by dotted key."""
        parts = self.environment.parts.by_name if isinstance(self.environment, MixtureEnvironment) else {}
        of_parts = {f"environment.parts.{name}.reward": reward_tuple(part.reward) for name, part in parts.items()}
        return {key: specs for key, specs in {"reward": reward_tuple(self.reward), **of_parts}.items() if specs}

    @property
    def with_own_files(self) -> Config:
        """The settings with the names of files in the run folder completed (`{run_dir}/...`)."""
        return self.with_files_of(self.run_dir)

    def with_files_of(self, run_folder: str) -> Config:
        """The settings with the files of a run folder in place of `{run_dir}/...`."""
        if not isinstance(self.environment, SplitFiles):
            return self
        return self.model_copy(update={"environment": self.environment.inside(run_folder)})

    @classmethod
    def completed(cls, given: Tree) -> Tree:
        """The settings as given, and a ratio to the engine's log-probs for completions of older weights."""
        tree = super().completed(given)
        rollout, algorithm = tree.get("rollout"), tree.get("algorithm", {})
        if isinstance(rollout, dict) and rollout.get("max_staleness_steps") and isinstance(algorithm, dict):
            ratio = {} if algorithm.get("importance_sampling_fix") else {"old_logprobs": "engine"}
            tree["algorithm"] = ratio | algorithm
        return tree

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        refuse(_disagreements(self))
        return self


def _disagreements(config: Config) -> Iterator[str]:
    """Settings of one section that cannot work with those of another."""
    algorithm, rollout = config.algorithm, config.rollout
    if config.checkpoint.keep_best and not config.evaluate.every_steps:
        yield (
            "checkpoint.keep_best=true keeps the checkpoint of the best dev reading, but evaluate.every_steps=0 takes "
            "none; set evaluate.every_steps"
        )
    placement = config.cluster.placement
    if rollout.max_staleness_steps and placement != "disaggregated":
        yield (
            f"rollout.max_staleness_steps={rollout.max_staleness_steps} draws during updates, but with "
            f"cluster.placement={placement} a GPU does one or the other; set cluster.placement=disaggregated and "
            "cluster.rollout_gpus, or rollout.max_staleness_steps=0"
        )
    if rollout.max_staleness_steps and not algorithm.corrects_for_engine:
        yield (
            f"rollout.max_staleness_steps={rollout.max_staleness_steps} trains on completions of older weights, which "
            "algorithm.old_logprobs=trainer takes for those of the newest; leave it out, or set it to engine, or set "
            "algorithm.importance_sampling_fix=true"
        )
    if algorithm.minibatches > rollout.prompts_per_step:
        yield (
            f"algorithm.minibatches={algorithm.minibatches} is more than rollout.prompts_per_step="
            f"{rollout.prompts_per_step}, so that some would be empty; lower algorithm.minibatches"
        )
    advantage = algorithm.advantage.name
    compares = advantage in ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
    if rollout.samples_per_prompt == 1 and (compares or algorithm.dynamic_sampling):
        which = "dynamic_sampling=true" if algorithm.dynamic_sampling else f"advantage={advantage}"
        yield (
            f"algorithm.{which} compares the completions of a prompt, but rollout.samples_per_prompt=1, so that no "
            "group has a signal; set rollout.samples_per_prompt=2 or more"
        )
    yield from rollout.engine.complaints(_engine_use(config))
    yield from megatron_complaints(config.train, config.model, algorithm, config.cluster)
    yield from _rates_of_frozen_parts(config)
    yield from _without_dev(config)
    yield from _weights_in_epochs(config)
    yield from list_complaints(config.reward, config.reward_weights)
    yield from process_complaints(config.rewards, config.reward_in)
    yield from _rewards_of_parts(config)
    yield from _rows_without_a_reward(config)
    yield from _second_opinion_without_a_rule(config)
    yield from _too_short(config)


def _rates_of_frozen_parts(config: Config) -> Iterator[str]:
    """Learning rates of parts that are not trained."""
    train, model = config.train, config.model
    parts = (
        ("vision_tower", train.vision_tower_learning_rate, model.trains_tower),
        ("projector", train.projector_learning_rate, model.trains_projector),
    )
    for part, rate, is_trained in parts:
        if rate is not None and not is_trained:
            yield (
                f"train.{part}_learning_rate={rate:g}, but the {part.replace('_', ' ')} is frozen; leave it out, or "
                f"set model.freeze_{part}=false, or model.lora.parts=[language_model, {part}] with model.lora"
            )


def _engine_use(config: Config) -> EngineUse:
    rollout = config.rollout
    return EngineUse(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
        max_prompt_tokens=config.data.max_prompt_tokens,
        corrects_for_engine=config.algorithm.corrects_for_engine,
        lora=config.model.lora,
    )


def _without_dev(config: Config) -> Iterator[str]:
    """Readings of dev rows where the environment has none."""
    evaluate = config.evaluate
    if config.warmup is None and not evaluate.every_steps:
        return
    reader = f"evaluate.every_steps={evaluate.every_steps}" if evaluate.every_steps else "the stop rule of warmup"
    for key, environment in config.environments.items():
        if isinstance(environment, SplitFiles) and not environment.has_dev:
            yield (
                f"{key}.dev_share=0 leaves no dev rows, but {reader} reads them; set {key}.dev_files, or a share such "
                f"as {key}.dev_share=0.05"
            )


def _weights_in_epochs(config: Config) -> Iterator[str]:
    """Weights of rows that come exactly once."""
    if config.max_epochs is None and config.data.shuffle:
        return
    once = "data.shuffle=false" if config.max_epochs is None else f"max_epochs={config.max_epochs}"
    if isinstance(config.environment, MixtureEnvironment):
        yield (
            f"{once} takes every row once an epoch, but environment.name=mixture draws its parts by their shares; "
            f"leave {once.partition('=')[0]} out"
        )
    weights = {
        "data.kind_weights": config.data.kind_weights,
        "curriculum.level_weights": config.curriculum.level_weights,
    }
    for setting in (name for name, given in weights.items() if given):
        yield f"{once} takes every row once an epoch, but {setting} draws some more often than others; drop either"


def _rewards_of_parts(config: Config) -> Iterator[str]:
    """Rewards of parts that the run's own reward replaces."""
    of_parts = [key for key in config.rewards if key != "reward"]
    if config.reward is not None and of_parts:
        yield (
            f"reward={config.reward} scores the rows of all parts, so that {of_parts[0]} would never be asked; drop "
            "either"
        )


def _rows_without_a_reward(config: Config) -> Iterator[str]:
    """Rows that nobody grades."""
    for key, environment in config.environments.items():
        reward = f"{key.removesuffix('environment')}reward"
        if isinstance(environment, RowsEnvironment) and not {"reward", reward} & config.rewards.keys():
            yield (
                f"{key}.name=rows grades no answers; set {reward} to your own function (docs/own.md), or choose "
                f"an environment that grades: {key}.name=vqa, geo3k or caption"
            )


def _second_opinion_without_a_rule(config: Config) -> Iterator[str]:
    """A second opinion where no rule can be overruled."""
    if config.second_opinion is not None and isinstance(config.environment, MixtureEnvironment):
        yield (
            "second_opinion overrules the rule of one environment, vqa or geo3k, and environment.name=mixture has "
            "several; set second_opinion=null, or use model_reward"
        )
    ruled = isinstance(config.environment, VqaEnvironment | Geo3kEnvironment) and config.reward is None
    if config.second_opinion is not None and not ruled:
        yield (
            "second_opinion overrules the rule of environment.name=vqa or geo3k, and this run has none of these "
            "graders; set second_opinion=null, or use model_reward"
        )


def _too_short(config: Config) -> Iterator[str]:
    """Spans of steps or completions that leave no room for what they pace."""
    rollout, kl, critic = config.rollout, config.algorithm.kl, config.algorithm.critic
    samples_per_step = rollout.prompts_per_step * rollout.samples_per_prompt
    controller = kl.controller if isinstance(kl, KlInReward) else None
    if controller is not None and controller.horizon_samples <= samples_per_step:
        yield (
            f"algorithm.kl.controller.horizon_samples={controller.horizon_samples} is no more than the "
            f"{samples_per_step} completions of one step, in which the coefficient would jump; set it to many steps' "
            "worth"
        )
    if critic is not None and critic.warmup_steps >= config.max_steps:
        yield (
            f"algorithm.advantage.critic.warmup_steps={critic.warmup_steps} leaves the policy none of max_steps="
            f"{config.max_steps}; lower it, or raise max_steps"
        )
