"""Builders of the environment and its graders."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fovea.config.run import Config
from fovea.models.families.registry import known
from fovea.models.reward_scorer import RewardScorer
from fovea.models.vision_reward import VisionRewardScorer
from fovea.processes.session_processes import end_left_processes
from fovea.wiring import reward_host
from fovea.wiring.frames import ModelPictures
from fovea.wiring.images import make_access, make_opener
from fovea.wiring.tools import make_tools, uses_tools
from fovea_gym.adapters.nemo_gym import NemoGym
from fovea_gym.benchmarks.environment import BenchmarkGrader
from fovea_gym.environments.base import Environment, MakesEnvironment, OpensSessions
from fovea_gym.environments.caption import Caption, CaptionGrader, JudgedCaptionGrader
from fovea_gym.environments.custom.environment import UserEnvironment, UserSessions, user_graders
from fovea_gym.environments.custom.grader import reward_grader
from fovea_gym.environments.custom.loading import checked_environment, checked_reward, load_environment, load_reward
from fovea_gym.environments.custom.processes import RewardProcesses
from fovea_gym.environments.custom.signatures import RewardFunction
from fovea_gym.environments.dataset_tasks import OwnRows
from fovea_gym.environments.geo3k import Geo3k, Geo3kGrader
from fovea_gym.environments.grounding.environment import Grounding
from fovea_gym.environments.grounding.shapes import GroundingShapes
from fovea_gym.environments.mixture import Part, errors_of_part, mixture_of, without_scores
from fovea_gym.environments.sessions import SETTINGS, EnvironmentWithSessions, LimitedSessions
from fovea_gym.environments.shapes.environment import Shapes, ShapesZoom
from fovea_gym.environments.shapes.small import SmallShapes
from fovea_gym.environments.stages import Stages
from fovea_gym.environments.vqa import Vqa, VqaGrader
from fovea_gym.errors import ConfigError
from fovea_gym.examples.games.environment import BoardGame
from fovea_gym.examples.pages.environment import Pages
from fovea_gym.graders.base import Grader
from fovea_gym.graders.grading import Closes, Grading
from fovea_gym.graders.judge import CAPTION_PROMPT, JudgeClient, limits_of
from fovea_gym.graders.limited_calls import MAX_LATE_CALLS, CallLimits, CallThreads, LimitedCalls, UnlimitedCalls
from fovea_gym.graders.opinions import (
    LimitedGrader,
    OpinionOfJudge,
    OpinionOfRewardModel,
    ScoresAnswers,
    WithModelReward,
    WithSecondOpinion,
    WithToolBonus,
)
from fovea_gym.settings.environments import (
    CaptionEnvironment,
    Geo3kEnvironment,
    GeoSpotEnvironment,
    GymnasiumEnvironment,
    MixtureEnvironment,
    MixturePart,
    NemoGymEnvironment,
    OpenEnvEnvironment,
    OwnEnvironment,
    RowsEnvironment,
    ShapesEnvironment,
    ShapesZoomEnvironment,
    SmallShapesEnvironment,
    VqaEnvironment,
)
from fovea_gym.settings.games import FrozenLakeEnvironment, PagesEnvironment, SokobanEnvironment
from fovea_gym.settings.grounding import GroundingEnvironment, GroundingShapesEnvironment
from fovea_gym.settings.rewards import RewardModel, reward_tuple
from fovea_gym.settings.splits import EnvironmentSettings, SessionLimits
from fovea_gym.tools.base import Tool
from fovea_gym.utils.bounded import read_file

LOG = logging.getLogger(__name__)


def with_opinions(config: Config, grading: Grading) -> Grading:
    """The grading with the second opinion and the model's share of the reward that the settings name."""
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
        models["judge"] = LimitedGrader(OpinionOfJudge(client.score, opener), LimitedCalls(limits_of(config.judge)))
    if config.reward_model is not None and "reward_model" in (config.model_reward or ()):
        models["reward_model"] = OpinionOfRewardModel(reward_scorer(config.reward_model), opener)
    if config.second_opinion:
        graders = [_second_opinion(grader, models["judge"], config.second_opinion) for grader in graders]
    if config.model_reward:
        shares = [(name, models[name], share) for name, share in config.model_reward.items()]
        graders = [WithModelReward(own=grader, models=shares) for grader in graders]
    calls = UnlimitedCalls("models that grade")
    return Grading(graders=tuple(graders), calls=calls, clients=tuple(clients), parts=grading.parts)


def _second_opinion(grader: Grader, judge: Grader, ask: Literal["wrong", "always"]) -> Grader:
    # of an environment that was given as an object
    if not isinstance(grader, VqaGrader | Geo3kGrader | BenchmarkGrader):
        raise ConfigError(
            f"second_opinion overrules the rules of vqa and geo3k, and this run has a {type(grader).__name__}; set "
            "second_opinion=null, or use model_reward"
        )
    return WithSecondOpinion(rule=grader, judge=judge, ask=ask)


def reward_scorer(settings: RewardModel) -> ScoresAnswers:
    """A scorer that reads images where the folder's model does, else one of text."""
    if _model_type(Path(settings.path)) in known():
        return VisionRewardScorer(settings)
    return RewardScorer(settings)


def _model_type(folder: Path) -> object:
    try:
        return json.loads(read_file(folder / "config.json")).get("model_type")
    except (OSError, ValueError, AttributeError):  # the scorer of text names what the folder lacks
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedEnvironment:
    """An environment with the graders of its answers."""

    environment: Environment
    grading: Grading
    stages: Stages = field(default_factory=Stages)
    """Stages of the curriculum, one per grader."""
    parts: Mapping[str, GradedEnvironment] = field(default_factory=dict)
    """Environments of a mixture by name; each grades its own answers."""
    tools: Sequence[Tool] = ()
    """Tools that the model may call beside those of the environment (`wiring.tools.with_tools`)."""


def make_environment(
    config: Config, given: Any = None, rewards: Sequence[RewardFunction] = (), tools: Sequence[object] = ()
) -> GradedEnvironment:
    """Make the environment of the settings, or wrap a `given` object; the setting `reward` replaces its graders.

    A GradedEnvironment is taken as it is from here, an object with `graders` is an environment of Fovea, and
    any other is treated like a user's class from a file. `rewards` and `tools` are the objects that these settings
    describe, where Python code has given them.
    """
    if given is None:
        made = named_environment(config.with_own_files)
    elif isinstance(given, GradedEnvironment):
        made = given
    else:
        made = object_environment(config, given, type(given).__name__)
    if config.reward is not None:
        # an environment's stages belong to its own graders
        made = GradedEnvironment(
            environment=without_scores(made.environment),
            grading=reward_grading(config, config.reward, rewards),
            tools=made.tools,
        )
    if config.second_opinion and isinstance(made.environment, OpensSessions):
        raise ConfigError(
            "second_opinion overrules the rules of vqa and geo3k, and this environment opens sessions, which may score "
            "their episodes; set second_opinion=null, or use model_reward"
        )
    grading = with_opinions(config, made.grading)
    if bonus := config.environment.tool_bonus:
        graders = tuple(WithToolBonus(own=grader, bonus=bonus) for grader in grading.graders)
        grading = replace(grading, graders=graders)
    return replace(made, grading=grading, tools=made.tools or make_tools(config, tools))


DRAWN: Mapping[type[EnvironmentSettings], Callable[[Any, int], Environment]] = {
    ShapesEnvironment: Shapes,
    ShapesZoomEnvironment: ShapesZoom,
    SmallShapesEnvironment: SmallShapes,
    FrozenLakeEnvironment: BoardGame,
    SokobanEnvironment: BoardGame,
    PagesEnvironment: Pages,
    GroundingShapesEnvironment: GroundingShapes,
}
"""Environments that draw their rows from the run's seed."""


def named_environment(config: Config) -> GradedEnvironment:
    """Make the environment of `environment.name`."""
    match config.environment:
        case CaptionEnvironment() as settings:
            return make_caption(config, settings)
        case MixtureEnvironment() as settings:
            return make_mixture(config, settings)
        case OwnEnvironment() as settings:
            return user_environment(config, load_environment(settings), settings.file)
        case GeoSpotEnvironment() as settings:
            # an optional extra; the module reports its absence
            from fovea_gym.environments.geospot.environment import GeoSpot

            made: Environment = GeoSpot(settings, make_access(config.data))
        case Geo3kEnvironment() as settings:
            made = Geo3k(settings, make_access(config.data))
        case VqaEnvironment() as settings:
            made = Vqa(settings, make_access(config.data))
        case RowsEnvironment() as settings:
            made = OwnRows(settings, make_access(config.data), imitated=config.warmup is not None)
        case GroundingEnvironment() as settings:
            pictures = ModelPictures(config.model, make_opener(config.data, Path(config.run_dir)))
            made = Grounding(settings, make_access(config.data), pictures)
        case settings if type(settings) in DRAWN:
            made = DRAWN[type(settings)](settings, config.seed)
        case settings:
            return package_environment(config, settings)
    return own_environment(config, made)


def package_environment(config: Config, settings: EnvironmentSettings) -> GradedEnvironment:
    """Make the environment of another package: by an adapter, which reports a missing extra, or by its settings."""
    access = make_access(config.data)
    match settings:
        case GymnasiumEnvironment():
            from fovea_gym.adapters.gymnasium import Gymnasium

            made: Environment = Gymnasium(settings)
        case OpenEnvEnvironment():
            from fovea_gym.adapters.openenv import OpenEnv

            made = OpenEnv(settings)
        case NemoGymEnvironment():
            made = NemoGym(settings, access)
        case _:
            assert isinstance(settings, MakesEnvironment), settings.name
            return object_environment(config, settings.make_environment(access, config.seed), settings.name)
    if config.warmup is not None:
        raise ConfigError(
            f"warmup imitates demonstrations, which environment.name={settings.name} does not have; set warmup=null"
        )
    return own_environment(config, made)


def make_mixture(config: Config, settings: MixtureEnvironment) -> GradedEnvironment:
    """Make the environments of all parts, each as in a separate run, and the one that deals tasks to them."""
    made = {name: _make_part(config, name, part) for name, part in settings.parts.by_name.items()}
    mixture = mixture_of(
        {
            name: Part(
                environment=each.environment,
                grading=each.grading,
                share=settings.parts.by_name[name].share,
                tools=each.tools,
            )
            for name, each in made.items()
        }
    )
    grading = Grading(graders=mixture.graders, parts=tuple(each.grading for each in made.values()))
    return GradedEnvironment(environment=mixture, grading=grading, parts=made)


def _make_part(config: Config, name: str, part: MixturePart) -> GradedEnvironment:
    # a model's share of the reward is that of the whole run's
    own = {"environment": part.environment, "reward": part.reward, "model_reward": None}
    with errors_of_part(name):
        made = make_environment(config.model_copy(update=own))
    if uses_tools(made.environment, made.tools) and (config.environment.tools or config.environment.mcp.by_name):
        raise ConfigError(
            f"environment.parts.{name} has tools, and the mixture has tools for all parts; name them either for each "
            "part, or in environment.tools and environment.mcp"
        )
    if made.stages.stages and config.curriculum.enabled:
        raise ConfigError(
            f"environment.parts.{name} has {len(made.stages.stages)} stages, which a mixture does not go through; set "
            "curriculum.enabled=false, so that its answers are scored by the last"
        )
    return made


def object_environment(config: Config, given: Any, name: str) -> GradedEnvironment:
    """An object with `graders` is an environment like Fovea's; any other is treated like a user's class from a file."""
    if hasattr(given, "graders"):
        return own_environment(config, given)
    return user_environment(config, checked_environment(given, name), name)


def own_environment(config: Config, environment: Any) -> GradedEnvironment:
    """An environment of Fovea with its graders, which never wait; its sessions may."""
    given: object = environment
    grading, stages = Grading(graders=environment.graders), stages_of(environment)
    if isinstance(given, OpensSessions):
        environment = _limited(environment, config.environment.session, type(given).__name__)
    return GradedEnvironment(environment=environment, grading=grading, stages=stages)


def user_environment(config: Config, user: Any, name: str) -> GradedEnvironment:
    """A user's environment, whose `score` is called like a reward function."""
    stages, limits = stages_of(user), reward_limits(config, f"{name}.score")
    return GradedEnvironment(
        environment=_with_replies(user, name, config.environment.session),
        grading=Grading(graders=user_graders(user, stages, limits.name), calls=LimitedCalls(limits)),
        stages=stages,
    )


def _with_replies(user: Any, name: str, limits: SessionLimits) -> Environment:
    """A user's environment; what replies in its episodes has limits."""
    replies = hasattr(user, "reply") and getattr(user, "max_turns", 1) > 1
    if not replies and not hasattr(user, "open"):
        return UserEnvironment(user, name)
    threads = CallThreads(
        name, setting=f"{SETTINGS}deadline_seconds", max_late_calls=max(MAX_LATE_CALLS, limits.max_concurrent)
    )
    return _limited(UserSessions(user, name, threads), limits, name)


def _limited(environment: EnvironmentWithSessions, limits: SessionLimits, name: str) -> Environment:
    """An environment with sessions under these limits; ends what the sessions of killed runs have left."""
    if num_ended := end_left_processes():
        LOG.warning("ended %d processes that the sessions of a killed run had left", num_ended)
    return LimitedSessions(environment, limits, name)


def stages_of(environment: Any) -> Stages:
    """Curriculum stages of an environment; most have none."""
    if not hasattr(environment, "stages"):
        return Stages()
    return Stages(stages=tuple(environment.stages), default_starts=tuple(environment.default_starts))


def reward_grading(config: Config, reward: str | tuple[str, ...], given: Sequence[RewardFunction] = ()) -> Grading:
    """Grading by the user's reward functions in all stages: the `given` ones, or those of files."""
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
    processes = RewardProcesses(reward_host.__name__, settings, limits.name, config.reward_timeout_seconds)
    # their own time limit leaves the start of a process out
    calls = LimitedCalls(replace(limits, timeout_seconds=None, may_hold_lock=False))
    return Grading(graders=(processes,), calls=calls, clients=(processes,))


def reward_limits(config: Config, name: str) -> CallLimits:
    """Limits for calls of the user's code."""
    return CallLimits(
        name=name,
        calls_at_once=config.reward_calls_at_once,
        timeout_seconds=config.reward_timeout_seconds,
        on_failure=config.reward_on_failure,
        may_hold_lock=True,
    )


def make_caption(config: Config, settings: CaptionEnvironment) -> GradedEnvironment:
    """Make the caption environment, with reward model and judge where they are set."""
    caption = Caption(settings, make_access(config.data))
    model = config.reward_model if "reward_model" in settings.metric_weights else None
    metrics = CaptionGrader(settings, caption.tasks, None if model is None else RewardScorer(model))
    if config.judge is None or "judge" not in settings.metric_weights:
        return GradedEnvironment(environment=caption, grading=Grading(graders=(metrics,)))
    client = JudgeClient(config.judge, CAPTION_PROMPT)
    opinion = OpinionOfJudge(client.score, make_opener(config.data, Path(config.run_dir)), metrics.references)
    calls = LimitedCalls(limits_of(config.judge))
    grading = Grading(graders=(JudgedCaptionGrader(metrics, opinion),), calls=calls, clients=(client,))
    return GradedEnvironment(environment=caption, grading=grading)
