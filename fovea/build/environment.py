"""The task family of a run, and what scores its answers."""

from __future__ import annotations

from pathlib import Path

from fovea.build.data import make_access, make_opener
from fovea.config.run import (
    CaptionEnvironment,
    Config,
    Geo3kEnvironment,
    GeoSpotEnvironment,
    OwnEnvironment,
    VqaEnvironment,
)
from fovea.environments.base import Environment
from fovea.environments.custom.loading import load_environment, load_reward
from fovea.environments.custom.reward import CallLimits, GuardedEnvironment, OwnReward
from fovea.environments.geo3k import Geo3k
from fovea.environments.shapes.environment import Shapes
from fovea.environments.vqa import Vqa


def make_environment(config: Config, environment: Environment | None = None) -> Environment:
    """The environment given, or the one that the settings name; scored by the function of `reward`, if there is one."""
    made = environment or named_environment(config)
    if config.reward is None:
        return made
    opener = make_opener(config.data, Path(config.run_dir))
    function = load_reward(config.reward)
    return OwnReward(made, function, opener, limits=call_limits(config), name=config.reward)


def named_environment(config: Config) -> Environment:
    """The task family that `environment.name` names."""
    if isinstance(config.environment, Geo3kEnvironment):
        return Geo3k(config.environment, make_access(config.data))
    if isinstance(config.environment, VqaEnvironment):
        return Vqa(config.environment, make_access(config.data))
    if isinstance(config.environment, CaptionEnvironment):
        return make_caption(config, config.environment)
    if isinstance(config.environment, GeoSpotEnvironment):
        from fovea.environments.geospot.environment import GeoSpot  # an extra: it says itself what is absent

        return GeoSpot(config.environment, make_access(config.data))
    if isinstance(config.environment, OwnEnvironment):
        own = load_environment(config.environment)
        return GuardedEnvironment(own, limits=call_limits(config), name=config.environment.file)
    return Shapes(config.environment, config.seed)


def call_limits(config: Config) -> CallLimits:
    """How the user's own code is called."""
    return CallLimits(
        timeout_seconds=config.reward_timeout_seconds,
        on_failure=config.reward_on_failure,
        calls_at_once=config.reward_calls_at_once,
    )


def make_caption(config: Config, settings: CaptionEnvironment) -> Environment:
    """Captions, with the models that score them."""
    from fovea.environments.caption import Caption, JudgedCaption

    reward_model = None
    if settings.reward_model is not None:
        from fovea.environments.graders.reward_model import RewardScorer

        reward_model = RewardScorer(settings.reward_model)
    caption = Caption(settings, reward_model, make_access(config.data))
    if settings.judge is None:
        return caption
    from fovea.environments.graders.judge import JudgeClient

    opener = make_opener(config.data, Path(config.run_dir))
    judge = JudgeClient(settings.judge)
    return JudgedCaption(caption, judge, opener, scores_at_once=settings.judge.max_concurrency)
