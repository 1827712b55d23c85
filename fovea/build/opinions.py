"""Builder of the models that grade answers beside the environment's own graders."""

from __future__ import annotations

import json
from pathlib import Path

from fovea.build.images import make_opener
from fovea.config.environments import Judge, RewardModel
from fovea.config.model_reward import ModelReward, SecondOpinion
from fovea.config.run import Config
from fovea.data.images import OpenImage
from fovea.environments.geo3k import Geo3kGrader
from fovea.environments.graders.base import Grader
from fovea.environments.graders.grading import Closes, Grading
from fovea.environments.graders.judge import JudgeClient, limits_of
from fovea.environments.graders.limited_calls import LimitedCalls, UnlimitedCalls
from fovea.environments.graders.opinions import (
    LimitedGrader,
    OpinionOfJudge,
    OpinionOfRewardModel,
    ScoresAnswers,
    WithModelReward,
    WithSecondOpinion,
)
from fovea.environments.graders.reward_model import RewardScorer
from fovea.environments.vqa import VqaGrader
from fovea.errors import ConfigError
from fovea.models.families.registry import known
from fovea.models.vision_reward import VisionRewardScorer
from fovea.utils.bounded import read_file


def with_opinions(config: Config, grading: Grading) -> Grading:
    """The grading with the second opinion and the model's share of the reward that the settings name."""
    if config.second_opinion is None and config.model_reward is None:
        return grading
    opener = make_opener(config.data, Path(config.run_dir))
    clients: list[Closes] = [*grading.clients]
    graders: list[Grader] = list(grading.graders)
    if isinstance(grading.calls, LimitedCalls):
        graders = [LimitedGrader(grader, grading.calls) for grader in graders]
    if config.second_opinion is not None:
        judge = _judge(config.second_opinion.judge, "second_opinion.judge", opener, clients)
        graders = [_second_opinion(grader, judge, config.second_opinion) for grader in graders]
    if config.model_reward is not None:
        graders = _model_rewards(graders, config.model_reward, opener, clients)
    calls = UnlimitedCalls("models that grade")
    return Grading(graders=tuple(graders), calls=calls, clients=tuple(clients), parts=grading.parts)


def _judge(settings: Judge, key: str, opener: OpenImage, clients: list[Closes]) -> Grader:
    client = JudgeClient(settings, key)
    clients.append(client)
    return LimitedGrader(OpinionOfJudge(client, opener), LimitedCalls(limits_of(settings, key)))


def _second_opinion(grader: Grader, judge: Grader, settings: SecondOpinion) -> Grader:
    if not isinstance(grader, VqaGrader | Geo3kGrader):  # of an environment that was given as an object
        raise ConfigError(
            f"second_opinion overrules the rules of vqa and geo3k, and this run has a {type(grader).__name__}; set "
            "second_opinion=null, or use model_reward"
        )
    return WithSecondOpinion(rule=grader, judge=judge, ask=settings.ask, accept_score=settings.accept_score)


def _model_rewards(
    graders: list[Grader], settings: ModelReward, opener: OpenImage, clients: list[Closes]
) -> list[Grader]:
    if settings.judge is not None:
        name, model = "judge", _judge(settings.judge, "model_reward.judge", opener, clients)
    else:
        assert settings.reward_model is not None, "the settings have one of the two"
        name, model = "reward_model", OpinionOfRewardModel(reward_scorer(settings.reward_model), opener)
    return [WithModelReward(own=grader, model=model, name=name, weight=settings.weight) for grader in graders]


def reward_scorer(settings: RewardModel) -> ScoresAnswers:
    """A scorer that reads images where the folder's model does, else one of text."""
    if _model_type(Path(settings.path)) in known():
        return VisionRewardScorer(settings)
    return RewardScorer(settings, "model_reward.reward_model")


def _model_type(folder: Path) -> object:
    try:
        return json.loads(read_file(folder / "config.json")).get("model_type")
    except (OSError, ValueError, AttributeError):  # the scorer of text names what the folder lacks
        return None
