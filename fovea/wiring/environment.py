"""Builder of the environment from its settings, wrapped in the limits, rewards, reward models and tools of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fovea.config.run import Config
from fovea.processes.session_processes import end_left_processes
from fovea.wiring.frames import ModelPictures
from fovea.wiring.grading import reward_grading, reward_limits, text_scorer, with_reward_models
from fovea.wiring.images import make_access, make_opener
from fovea.wiring.tools import SESSION, limited, make_tools, uses_tools
from fovea_gym.environments.access import Access, GradedEnvironment, Part
from fovea_gym.environments.base import Environment, defines
from fovea_gym.environments.custom.environment import UserEnvironment, UserSessions, user_graders
from fovea_gym.environments.custom.loading import checked_environment
from fovea_gym.environments.custom.signatures import RewardFunction
from fovea_gym.environments.mixture import Mixture, errors_of_part, without_scores
from fovea_gym.environments.stages import stages_of
from fovea_gym.errors import ConfigError
from fovea_gym.graders.grading import MAX_LATE_CALLS, CallThreads, Grading, LimitedCalls
from fovea_gym.graders.reward_models import WithToolBonus
from fovea_gym.settings.environments import MixturePart, OwnEnvironment

SECTION = "environment."
"""Prefix of an environment's settings in a recipe."""
LOG = logging.getLogger(__name__)


def make_environment(
    config: Config, given: Any = None, rewards: Sequence[RewardFunction] = (), tools: Sequence[object] = ()
) -> GradedEnvironment:
    """Make the environment of the settings, or wrap a `given` object; the setting `reward` replaces its graders.

    A given GradedEnvironment is not wrapped again. `rewards` and `tools` are the objects for the settings `reward` and
    `environment.tools`, if Python code gave them.
    """
    if isinstance(given, GradedEnvironment):
        made = given
    elif given is not None:
        made = graded(config, given, type(given).__name__)
    else:
        settings = config.with_own_files.environment
        name = settings.file if isinstance(settings, OwnEnvironment) else settings.name
        made = graded(config, settings.made(offered(config), config.seed), name)
    if config.warmup is not None and not made.environment.has_demonstrations:
        raise ConfigError(
            f"warmup imitates demonstrations, but environment.name={config.environment.name} does not provide any; set "
            "warmup=null"
        )
    if config.reward is not None:
        # without the environment's stages, since they belong to its own graders
        made = GradedEnvironment(
            environment=without_scores(made.environment),
            grading=reward_grading(config, config.reward, rewards),
            tools=made.tools,
        )
    if config.second_opinion and made.environment.has_sessions:
        raise ConfigError(
            "second_opinion corrects the rule-based scores of vqa and geo3k, but this environment opens sessions, "
            "which may score their episodes themselves; set second_opinion=null, or use model_reward"
        )
    grading = with_reward_models(config, made.grading)
    if bonus := config.environment.tool_bonus:
        graders = tuple(WithToolBonus(own=grader, bonus=bonus) for grader in grading.graders)
        grading = replace(grading, graders=graders)
    return replace(made, grading=grading, tools=made.tools or make_tools(config, tools))


def offered(config: Config) -> Access:
    """The objects and limits that a run with these settings offers to its environment."""
    rows, opener = make_access(config.data), make_opener(config.data, Path(config.run_dir))
    return Access(
        cache_dir=rows.cache_dir,
        image_root=rows.image_root,
        url_limits=rows.url_limits,
        section=SECTION,
        data_section=rows.data_section,
        cache=rows.cache,
        imitated=config.warmup is not None,
        pictures=ModelPictures(config.model, opener),
        open_image=opener,
        judge=config.judge,
        reward_model=None if config.reward_model is None else partial(text_scorer, config.reward_model),
        make_part=partial(_make_part, config),
    )


def _make_part(config: Config, name: str, part: MixturePart) -> Part:
    # model_reward is applied once to the whole run, not per part
    own = {"environment": part.environment, "reward": part.reward, "model_reward": None}
    with errors_of_part(name, SECTION):
        made = make_environment(config.model_copy(update=own))
    if uses_tools(made.environment, made.tools) and (config.environment.tools or config.environment.mcp.by_name):
        raise ConfigError(
            f"environment.parts.{name} has tools, and the mixture has tools for all parts; name tools either in each "
            "part, or in environment.tools and environment.mcp"
        )
    if made.stages.stages and config.curriculum.enabled:
        raise ConfigError(
            f"environment.parts.{name} has {len(made.stages.stages)} curriculum stages, but a mixture does not step "
            "through stages; set curriculum.enabled=false to score its answers by the last stage"
        )
    return Part(environment=made.environment, grading=made.grading, tools=made.tools, share=part.share)


def graded(config: Config, given: Any, name: str) -> GradedEnvironment:
    """An environment with graders, and with limits on its calls; without graders, its `score` method grades."""
    stages, parts = stages_of(given), given.parts if isinstance(given, Mixture) else {}
    has_graders = hasattr(given, "graders")
    if isinstance(given, Environment) and has_graders:
        environment, grading, name = given, given.grading(), type(given).__name__
    else:
        user = given if has_graders else checked_environment(given, name, SECTION.removesuffix("."))
        environment = _user_environment(user, name, config.environment.session.max_concurrent)
        limits = reward_limits(config, f"{name}.score")
        grading = (
            Grading(graders=tuple(given.graders))
            if has_graders
            else Grading(graders=user_graders(user, stages, limits.name), calls=LimitedCalls(limits))
        )
    if environment.has_sessions and not parts:
        # the sessions of a mixture are limited by each part
        environment = limited(environment, config.environment.session, name)
        if num_ended := end_left_processes():
            LOG.warning("ended %d processes that were left over from the sessions of a killed run", num_ended)
    return GradedEnvironment(environment=environment, grading=grading, stages=stages, parts=parts)


def _user_environment(user: Any, name: str, max_concurrent: int) -> UserEnvironment:
    """Wrap a user's environment; if it has sessions or several turns, its methods are called in threads."""
    replies = defines(user, "reply") and getattr(user, "max_turns", 1) > 1
    if not replies and not defines(user, "open"):
        return UserEnvironment(user, name)
    late = max(MAX_LATE_CALLS, max_concurrent)
    return UserSessions(user, name, CallThreads(name, setting=f"{SESSION}deadline_seconds", max_late_calls=late))
