"""Builder of a mixture: several data sets in one run, each with its own environment and share (docs/own.md)."""

from __future__ import annotations

from collections.abc import Mapping

from fovea.build.environment import GradedEnvironment, make_environment
from fovea.config.run import Config
from fovea.environments.graders.grading import Grading
from fovea.environments.mixture import Mixture, Part


def mix(parts: Mapping[str, tuple[float, Config]]) -> GradedEnvironment:
    """Make the environment of all `parts`, by name: the share of each, and the settings with its environment.

    Of the settings `environment`, `reward` and `data` count, as in a run of that part alone.
    """
    made = {name: make_environment(config) for name, (_, config) in parts.items()}
    mixture = Mixture(
        {
            name: Part(environment=each.environment, grading=each.grading, share=parts[name][0])
            for name, each in made.items()
        }
    )
    gradings = tuple(each.grading for each in made.values())
    return GradedEnvironment(environment=mixture, grading=Grading(graders=mixture.graders, parts=gradings))
