"""`Access`, the objects that a run gives to an environment, and `GradedEnvironment`, an environment with graders."""

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
    """Tools that the model may call in addition to the environment's (`fovea.wiring.tools.with_tools`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(GradedEnvironment):
    """One environment of a mixture."""

    share: float
    """How often its rows are sampled, relative to the shares of the other parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access(RowAccess):
    """The objects that a run gives to an environment: access to data files, and more for environments that need it."""

    imitated: bool = False
    """True if a supervised warm-up trains on `demonstration`, so that every row needs an answer."""
    pictures: Pictures | None = None
    """Sizes of pictures as the model sees them."""
    open_image: OpenImage | None = None
    """Function that opens the pictures for a judge."""
    judge: Judge | None = None
    """A model behind an endpoint that grades answers."""
    reward_model: Callable[[], ScoresAnswers] | None = None
    """Function that loads a text reward model."""
    make_part: Callable[[str, MixturePart], Part] | None = None
    """Function that makes a part of a mixture from its name and settings; None: with the environment's own graders."""
