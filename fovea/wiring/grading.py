"""Builders of graders: the user's reward functions, and reward models in addition to the environment's graders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.families.registry import known
from fovea.models.reward_scorer import RewardScorer
from fovea.models.vision_reward import VisionRewardScorer, named_as_reward_model
from fovea.wiring import reward_host
from fovea.wiring.images import make_opener
from fovea.wiring.model_trial import try_model, try_scorer
from fovea.wiring.tools import RESUME
from fovea_gym.environments.custom.grader import reward_grader
from fovea_gym.environments.custom.loading import checked_reward, load_reward
from fovea_gym.environments.custom.processes import RewardProcesses
from fovea_gym.environments.custom.signatures import RewardFunction
from fovea_gym.errors import ConfigError
from fovea_gym.graders.base import Grader
from fovea_gym.graders.grading import (
    CallLimits,
    CallThreads,
    Closes,
    Grading,
    LimitedCalls,
    LimitedGrader,
    UnlimitedCalls,
)
from fovea_gym.graders.judge import JudgeClient, limits_of
from fovea_gym.graders.reward_models import (
    JudgeScores,
    Overrulable,
    RewardModelScores,
    ScoresAnswers,
    WithModelReward,
    WithSecondOpinion,
)
from fovea_gym.settings.rewards import RewardModel, reward_tuple
from fovea_gym.utils.bounded import read_file


def reward_grading(config: Config, reward: str | tuple[str, ...], given: Sequence[RewardFunction] = ()) -> Grading:
    """Grading by the user's reward functions in all stages: the `given` functions, or functions from files."""
    names = reward_tuple(reward)
    name = ", ".join(names)
    limits = reward_limits(config, name)
    if config.reward_in == "process":
        return _in_processes(config, reward, limits)
    functions = [checked_reward(*each) for each in zip(given, names, strict=True)] if given else map(load_reward, names)
    opener = make_opener(config.data, Path(config.run_dir))
    grader = reward_grader(reward, list(functions), config.reward_weights, opener, CallThreads(name))
    return Grading(graders=(grader,), calls=LimitedCalls(limits))


def _in_processes(config: Config, reward: str | tuple[str, ...], limits: CallLimits) -> Grading:
    settings = {
        "reward": reward,
        "weights": config.reward_weights,
        "data": config.data.model_dump(mode="json"),
        "run_dir": config.run_dir,
    }
    processes = RewardProcesses(reward_host.__name__, settings, limits)
    # the processes apply their own time limit, which excludes the start of a process
    calls = LimitedCalls(replace(limits, timeout_seconds=None, may_hold_lock=False))
    return Grading(graders=(processes,), calls=calls, clients=(processes,))


def reward_limits(config: Config, name: str) -> CallLimits:
    """Limits of calls to the user's code."""
    return CallLimits(
        name=name,
        settings="reward_",
        calls_at_once=config.reward_calls_at_once,
        timeout_seconds=config.reward_timeout_seconds,
        on_failure=config.reward_on_failure,
        may_hold_lock=True,
        way_out=f", or set reward_in=process, where such a call can be ended{RESUME}",
    )


def with_reward_models(config: Config, grading: Grading) -> Grading:
    """The grading, with the second opinion and the model reward of the settings added."""
    if not config.second_opinion and not config.model_reward:
        return grading
    opener = make_opener(config.data, Path(config.run_dir))
    clients: list[Closes] = [*grading.clients]
    graders: list[Grader] = list(grading.graders)
    if isinstance(grading.calls, LimitedCalls):
        graders = [LimitedGrader(grader, grading.calls) for grader in graders]
    models: dict[str, Grader] = {}
    if config.judge is not None and (config.second_opinion or "judge" in (config.model_reward or ())):
        client = JudgeClient(config.judge)
        clients.append(client)
        models["judge"] = LimitedGrader(JudgeScores(client.score, opener), LimitedCalls(limits_of(config.judge)))
    if config.reward_model is not None and "reward_model" in (config.model_reward or ()):
        models["reward_model"] = RewardModelScores(reward_scorer(config.reward_model), opener)
    if config.second_opinion:
        graders = [_second_opinion(grader, models["judge"], config.second_opinion) for grader in graders]
    if config.model_reward:
        shares = [(name, models[name], share) for name, share in config.model_reward.items()]
        graders = [WithModelReward(own=grader, models=shares) for grader in graders]
    calls = UnlimitedCalls("models that grade")
    return Grading(graders=tuple(graders), calls=calls, clients=tuple(clients), parts=grading.parts)


def _second_opinion(grader: Grader, judge: Grader, ask: Literal["wrong", "always"]) -> Grader:
    # possible if the environment was given as an object
    if not isinstance(grader, Overrulable):
        raise ConfigError(
            f"second_opinion corrects the rule-based scores of vqa and geo3k, but this run has a "
            f"{type(grader).__name__}; set second_opinion=null, or use model_reward"
        )
    return WithSecondOpinion(rule=grader, judge=judge, ask=ask)


def reward_scorer(settings: RewardModel) -> ScoresAnswers:
    """A scorer that reads images if the model does, else a scorer of texts; ModelError if the model's trial fails."""
    if _model_type(Path(settings.path)) not in known():
        return text_scorer(settings)
    with named_as_reward_model():
        try_model(Model(path=settings.path))
    return VisionRewardScorer(settings)


def text_scorer(settings: RewardModel) -> RewardScorer:
    """A scorer of texts; ModelError if the trial of the folder fails."""
    try_scorer(settings.path)
    return RewardScorer(settings)


def _model_type(folder: Path) -> object:
    try:
        return json.loads(read_file(folder / "config.json")).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):  # the text scorer reports what the folder lacks
        return None
