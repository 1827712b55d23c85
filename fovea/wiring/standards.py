"""Builder of the environments that come in a standard of other packages."""

from __future__ import annotations

from fovea.config.environments import GymnasiumEnvironment, NemoGymEnvironment, OpenEnvEnvironment
from fovea.config.run import Config
from fovea.config.splits import EnvironmentSettings
from fovea.environments.adapters.nemo_gym import NemoGym
from fovea.environments.base import Environment
from fovea.errors import ConfigError
from fovea.wiring.images import make_access


def standard_environment(config: Config, settings: EnvironmentSettings) -> Environment | None:
    """Make the environment of a standard; None for settings of another kind.

    Two adapters need an optional extra, and their modules report its absence.
    """
    match settings:
        case GymnasiumEnvironment():
            from fovea.environments.adapters.gymnasium import Gymnasium

            made: Environment = Gymnasium(settings)
        case OpenEnvEnvironment():
            from fovea.environments.adapters.openenv import OpenEnv

            made = OpenEnv(settings)
        case NemoGymEnvironment():
            made = NemoGym(settings, make_access(config.data))
        case _:
            return None
    if config.warmup is not None:
        raise ConfigError(
            f"warmup imitates demonstrations, which environment.name={settings.name} does not have; set warmup=null"
        )
    return made
