"""Access of an environment to what a run offers, and the graded environment that is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fovea_gym.environments.base import Environment
from fovea_gym.environments.grounding.coordinates import Pictures
from fovea_gym.environments.stages import Stages
from fovea_gym.graders.grading import Grading
from fovea_gym.graders.reward_models import ScoresAnswers
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.images import OpenImage
from fovea_gym.settings.environments import MixturePart
from fovea_gym.settings.rewards import Judge
from fovea_gym.tools.base import Tool


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(GradedEnvironment):
    """One environment of a mixture."""

    share: float
    """How often its rows are drawn, relative to the shares of the other parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access(RowAccess):
    """Access of an environment to what a run offers: files that it may read, and for some more than that."""

    imitated: bool = False
    """True if a warm-up imitates `demonstration`, so that every row needs an answer."""
    pictures: Pictures | None = None
    """Sizes of pictures as the model sees them."""
    open_image: OpenImage | None = None
    """Opens the pictures that a judge sees."""
    judge: Judge | None = None
    """A model behind an endpoint that grades answers."""
    reward_model: Callable[[], ScoresAnswers] | None = None
    """Loads a reward model of text."""
    make_part: Callable[[str, MixturePart], Part] | None = None
    """Makes a part of a mixture, by its name; default: with the graders of its environment."""
