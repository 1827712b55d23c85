"""Rules across sections of the settings; each yields an error text that says what to change.

A rule within one section belongs to that section, and settings that an engine cannot work with to the engine's section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fovea.config.algorithm import KlInReward
from fovea.config.backends import EngineUse, MegatronBackend
from fovea_gym.settings.base import Section
from fovea_gym.settings.environments import (
    CaptionEnvironment,
    Geo3kEnvironment,
    MixtureEnvironment,
    RowsEnvironment,
    VqaEnvironment,
)
from fovea_gym.settings.rewards import FROM_PYTHON, OVERLONG, GradingModel, part_name, reward_tuple
from fovea_gym.settings.splits import SplitFiles

if TYPE_CHECKING:
    from fovea.config.run import Config

_ONE_RATE = "its optimizer has one learning rate for all weights"


def disagreements(config: Config) -> Iterator[str]:
    """Contradictions between the settings of two sections."""
    algorithm, rollout = config.algorithm, config.rollout
    if config.checkpoint.keep_best and not config.evaluate.every_steps:
        yield (
            "checkpoint.keep_best=true keeps the checkpoint with the best dev accuracy, but evaluate.every_steps=0 "
            "never evaluates; set evaluate.every_steps"
        )
    placement = config.cluster.placement
    if rollout.max_staleness_steps and placement != "disaggregated":
        yield (
            f"rollout.max_staleness_steps={rollout.max_staleness_steps} samples during updates, but with "
            f"cluster.placement={placement} a GPU cannot do both at once; set cluster.placement=disaggregated and "
            "cluster.rollout_gpus, or rollout.max_staleness_steps=0"
        )
    if rollout.max_staleness_steps and not algorithm.corrects_for_engine:
        yield (
            f"rollout.max_staleness_steps={rollout.max_staleness_steps} trains on completions of older weights, which "
            "algorithm.old_logprobs=trainer treats as those of the newest; leave it out, set it to engine, or set "
            "algorithm.importance_sampling_fix=true"
        )
    if algorithm.minibatches > rollout.prompts_per_step:
        yield (
            f"algorithm.minibatches={algorithm.minibatches} is more than rollout.prompts_per_step="
            f"{rollout.prompts_per_step}, so that some would be empty; lower algorithm.minibatches"
        )
    if rollout.samples_per_prompt == 1 and algorithm.compares:
        which = "dynamic_sampling=true" if algorithm.dynamic_sampling else f"advantage={algorithm.advantage.name}"
        yield (
            f"algorithm.{which} compares the completions of a prompt, but rollout.samples_per_prompt=1, so that no "
            "group has a signal; set rollout.samples_per_prompt=2 or more"
        )
    yield from rollout.engine.complaints(_engine_use(config))
    of_rewards = (_reward_list, _rewards_in_processes, _rewards_without_rows, _models_that_grade, _second_opinion)
    for rule in (
        _megatron,
        _augmentation,
        _rates_of_frozen_parts,
        _without_dev,
        _weights_in_epochs,
        *of_rewards,
        _too_short,
    ):
        yield from rule(config)


def _augmentation(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    given = {"rollout.augmentation": rollout.augmentation, "algorithm.augmentation": algorithm.augmentation}
    for key in (key for key, value in given.items() if value is not None and rollout.max_staleness_steps):
        yield (
            f"{key} compares log-probs of one policy, but rollout.max_staleness_steps={rollout.max_staleness_steps} "
            f"samples with older weights; set rollout.max_staleness_steps=0, or {key}=null"
        )
    if rollout.augmentation is None:
        return
    if algorithm.corrects_for_engine:
        yield (
            "rollout.augmentation samples completions on noisy pictures, where the engine's log-probs differ from "
            "those on clean ones: importance_sampling_fix and old_logprobs=engine compare the two; leave both out, "
            "or set rollout.augmentation=null"
        )
    if not 0 < rollout.augmentation.num_sampled(rollout.samples_per_prompt) < rollout.samples_per_prompt:
        yield (
            f"rollout.augmentation.share={rollout.augmentation.share} of "
            f"rollout.samples_per_prompt={rollout.samples_per_prompt} is none or all of a group; set a share "
            "such as 0.5, and at least 2 samples per prompt"
        )


def _rates_of_frozen_parts(config: Config) -> Iterator[str]:
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
        stop_after_answer=rollout.stop_after_answer,
        corrects_for_engine=config.algorithm.corrects_for_engine,
        lora=config.model.lora,
    )


def _without_dev(config: Config) -> Iterator[str]:
    evaluate = config.evaluate
    if config.warmup is None and not evaluate.every_steps:
        return
    reader = f"evaluate.every_steps={evaluate.every_steps}" if evaluate.every_steps else "the stop rule of warmup"
    for key, environment in config.environments.items():
        if isinstance(environment, SplitFiles) and not environment.has_dev:
            yield (
                f"{key}.dev_share=0 leaves no dev rows, but {reader} needs them; set {key}.dev_files, or a share such "
                f"as {key}.dev_share=0.05"
            )


def _weights_in_epochs(config: Config) -> Iterator[str]:
    if config.max_epochs is None and config.data.shuffle:
        return
    once = "data.shuffle=false" if config.max_epochs is None else f"max_epochs={config.max_epochs}"
    if isinstance(config.environment, MixtureEnvironment):
        yield (
            f"{once} uses every row once per epoch, but environment.name=mixture samples parts by their shares; "
            f"leave {once.partition('=')[0]} out"
        )
    weights = {
        "data.kind_weights": config.data.kind_weights,
        "curriculum.level_weights": config.curriculum.level_weights,
    }
    for setting in (name for name, given in weights.items() if given):
        yield f"{once} uses every row once per epoch, but {setting} samples some more often; drop one of the two"


def _rewards_without_rows(config: Config) -> Iterator[str]:
    """Rewards of parts that the run's own reward replaces, and rows without a grader."""
    of_parts = [key for key in config.rewards if key != "reward"]
    if config.reward is not None and of_parts:
        yield (
            f"reward={config.reward} scores the rows of all parts, so that {of_parts[0]} would never be called; "
            "drop one of the two"
        )
    for key, environment in config.environments.items():
        reward = f"{key.removesuffix('environment')}reward"
        if isinstance(environment, RowsEnvironment) and not {"reward", reward} & config.rewards.keys():
            yield (
                f"{key}.name=rows grades no answers; set {reward} to your own function (docs/own.md), or choose "
                f"an environment that grades: {key}.name=vqa, geo3k or caption"
            )


def _models_that_grade(config: Config) -> Iterator[str]:
    shares = config.model_reward or {}
    if config.model_reward is not None and not 0 < sum(shares.values()) <= 1:
        yield f"model_reward={shares} must be shares with a sum of at most 1; write {{judge: 0.5}}, or null"
    captions = {key: each for key, each in config.environments.items() if isinstance(each, CaptionEnvironment)}
    models: dict[GradingModel, Section | None] = {"judge": config.judge, "reward_model": config.reward_model}
    for name, model in models.items():
        asking = [f"{key}.metric_weights" for key, each in captions.items() if name in each.metric_weights]
        asking += ["model_reward"] if name in shares else []
        asking += ["second_opinion"] if name == "judge" and config.second_opinion else []
        if asking and model is None:
            yield f"{asking[0]} uses the model of `{name}`, which is not set; set {name}, or leave {asking[0]} out"
        if model is not None and not asking:
            yield f"{name} is set, but nothing uses it; set model_reward={{{name}: 0.5}}, or {name}=null"


def _second_opinion(config: Config) -> Iterator[str]:
    if config.second_opinion is None:
        return
    if isinstance(config.environment, MixtureEnvironment):
        yield (
            "second_opinion overrules the rule of one environment, vqa or geo3k, but environment.name=mixture has "
            "several; set second_opinion=null, or use model_reward"
        )
    elif not isinstance(config.environment, VqaEnvironment | Geo3kEnvironment) or config.reward is not None:
        yield (
            "second_opinion overrules the rule of environment.name=vqa or geo3k, but this run uses neither "
            "rule; set second_opinion=null, or use model_reward"
        )


def _too_short(config: Config) -> Iterator[str]:
    """Numbers of steps or completions that are too small or too large for this run."""
    rollout, kl, critic = config.rollout, config.algorithm.kl, config.algorithm.critic
    samples_per_step = rollout.prompts_per_step * rollout.samples_per_prompt
    controller = kl.controller if isinstance(kl, KlInReward) else None
    if controller is not None and controller.horizon_samples <= samples_per_step:
        yield (
            f"algorithm.kl.controller.horizon_samples={controller.horizon_samples} is no more than the "
            f"{samples_per_step} completions of one step, so that the coefficient would jump; set it to those "
            "of many steps"
        )
    if critic is not None and critic.warmup_steps >= config.max_steps:
        yield (
            f"algorithm.advantage.critic.warmup_steps={critic.warmup_steps} leaves the policy no step of max_steps="
            f"{config.max_steps}; lower it, or raise max_steps"
        )


def _megatron(config: Config) -> Iterator[str]:
    train, algorithm, placement = config.train, config.algorithm, config.cluster.placement
    if not isinstance(train.backend, MegatronBackend):
        return
    if train.backend.sequence_parallel and train.backend.tensor_parallel_size == 1:
        yield (
            "train.backend.sequence_parallel=true with train.backend.tensor_parallel_size=1: tokens are divided among "
            "the GPUs that a layer is split over; set tensor_parallel_size, or leave sequence_parallel out"
        )
    lora, tensor = config.model.lora, train.backend.tensor_parallel_size
    if lora is not None and lora.rank % tensor:
        yield (
            f"model.lora.rank={lora.rank} with train.backend.tensor_parallel_size={tensor}: the rows of an adapter are "
            f"divided too; set the rank to a multiple of {tensor}"
        )
    refused = {
        "model.lora.dropout": lora is not None and lora.dropout > 0 and "copies of a prompt would get separate masks",
        "model.lora.parts": lora is not None
        and lora.parts != ("language_model",)
        and "it supports adapters only on the language model",
        "algorithm.advantage.critic.trunk=separate": algorithm.critic is not None
        and algorithm.critic.trunk == "separate"
        and "it supports only a value head on the policy's states",
        f"cluster.placement={placement}": placement != "collocated"
        and "its process groups include all processes, but some of them would not train",
        "train.gradient_checkpointing=selective": train.gradient_checkpointing == "selective"
        and "it recomputes whole layers (full) or none",
        "train.vision_tower_learning_rate": train.vision_tower_learning_rate is not None and _ONE_RATE,
        "train.projector_learning_rate": train.projector_learning_rate is not None and _ONE_RATE,
    }
    for setting, reason in refused.items():
        if reason:
            yield f"{setting} with train.backend=megatron: {reason}; change that setting, or set train.backend=torch"


def _reward_list(config: Config) -> Iterator[str]:
    reward, weights = config.reward, config.reward_weights
    if reward == ():
        yield "reward=[] names no function; name one or more, or leave reward out"
        return
    specs = reward_tuple(reward)
    if weights is not None and (isinstance(reward, str) or len(weights) != len(specs)):
        given = f"reward={reward} is one function" if isinstance(reward, str) else f"reward has {len(specs)} functions"
        yield (
            f"reward_weights={list(weights)} needs one number per function of a list, but {given}; give as many, or "
            "leave reward_weights out"
        )
    if reward is None or isinstance(reward, str):
        return
    names = [part_name(spec) for spec in reward]
    if OVERLONG in names:
        yield (
            f"reward={list(reward)}: the metric reward/{OVERLONG} is the penalty of algorithm.{OVERLONG}; rename the "
            f"function {OVERLONG}"
        )
    for name in dict.fromkeys(names):
        if names.count(name) > 1 or not name.isidentifier():
            yield (
                f"reward={list(reward)} lists functions that are logged as reward/NAME, but {name} names "
                f"{names.count(name)} of them; write each as a def with a unique name"
            )


def _rewards_in_processes(config: Config) -> Iterator[str]:
    if config.reward_in == "thread":
        return
    if not config.rewards:
        yield (
            "reward_in=process runs reward functions from files, but none is set; set reward=path/to/file.py:name, "
            "or leave reward_in out"
        )
    for key, specs in config.rewards.items():
        for spec in specs:
            if spec.startswith(FROM_PYTHON):
                yield (
                    f"reward_in=process imports {key} in its own processes, but {key}={spec} is an object of this "
                    f"process; write it into a file, {key}='path/to/file.py:{part_name(spec)}', or leave reward_in out"
                )
