"""An engine in the Python environment of `rollout.engine.python`, started from the trainer's process."""

from __future__ import annotations

import math
from typing import Any

import torch

from fovea import __version__
from fovea.algorithms.policy_loss import HasFormula
from fovea.config.algorithm import ClippedLoss
from fovea.config.backends import StreamedEngine as StreamedSettings
from fovea.config.base import Section
from fovea.config.environments import ShapesEnvironment
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.environments.base import MakesEnvironment
from fovea.errors import ClusterError, ConfigError, FoveaError, OutOfMemoryError
from fovea.processes.engine_process import EngineProcess, Limits, NotStartedError
from fovea.rollout.remote_engine import RemoteEngine
from fovea.utils.installing import pip_install
from fovea.utils.launch import module_command
from fovea.wiring.interpreter import find_interpreter, variables_of

NO_LIMITS = Limits(start_seconds=math.inf, timeout_seconds=math.inf)
"""The engine's own limits are applied in the process that makes it."""


def make_remote(config: Config, settings: StreamedSettings, model: Model) -> RemoteEngine:
    """Start the engine of the settings with the interpreter that they name; ConfigError where it does not start."""
    assert settings.python is not None
    here = f"rollout.engine.python={settings.python}"
    python = find_interpreter(settings.python)
    command = module_command("fovea.wiring.other_environment", python)
    sent = _sent(config, settings, model)
    try:
        process = EngineProcess(f"the engine of {settings.python}", command, sent, NO_LIMITS, variables_of(python))
    except (NotStartedError, OSError) as error:
        install = f"{settings.python} -m {pip_install(settings.extra)}"
        raise ConfigError(f"{here}: {error}; where Fovea or the engine is missing there: {install}") from error
    except (ClusterError, OutOfMemoryError):  # whose exit codes tell a supervisor to try again
        raise
    except FoveaError as error:
        raise ConfigError(f"{here}: {error}") from error
    return RemoteEngine(settings.name, process)


def _sent(config: Config, settings: StreamedSettings, model: Model) -> dict[str, Any]:
    """Payload for `other_environment.main` in the child: settings as JSON, with `python` unset."""
    rollout = config.rollout.model_copy(update={"engine": settings.model_copy(update={"python": None})})
    changed = {"rollout": rollout, **_in_place_of_packages(config)}
    return {
        "version": __version__,
        # not pickled: the other environment may have another version of what settings are made of
        "config": config.model_copy(update=changed).model_dump(mode="json"),
        "model": model.model_dump(mode="json"),
        "gpu": torch.cuda.current_device() if torch.cuda.is_available() else None,
    }


def _in_place_of_packages(config: Config) -> dict[str, Section]:
    """Defaults for the sections of packages that the engine does not need, and which its environment may lack."""
    changed: dict[str, Section] = {}
    if any(isinstance(each, MakesEnvironment) for each in config.environments.values()):
        changed["environment"] = ShapesEnvironment()
    if isinstance(config.algorithm.loss, HasFormula):
        changed["algorithm"] = config.algorithm.model_copy(update={"loss": ClippedLoss()})
    if config.log.tracker is not None:
        changed["log"] = config.log.model_copy(update={"tracker": None})
    return changed
