"""Builders of the rollout engine, in this or another Python environment, its activation tape, and the evaluator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fovea import __version__
from fovea.algorithms.policy_loss import HasFormula
from fovea.config.algorithm import ClippedLoss
from fovea.config.backends import StreamedEngine as StreamedSettings
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.evaluation.evaluator import Answers, Evaluator
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor
from fovea.models.vlm import VLM
from fovea.processes.engine_process import EngineProcess, Limits, NotStartedError
from fovea.rollout.access import EngineAccess
from fovea.rollout.base import Engine
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.remote_engine import RemoteEngine
from fovea.run.sampling import answer_end_of
from fovea.train.update import TrainedPolicy
from fovea.types import Sampling
from fovea.utils.installing import pip_install_elsewhere
from fovea.weights.base import SyncedEngine, WeightReceiver
from fovea.weights.sync import NetworkCopy, NetworkEngine
from fovea.wiring.interpreter import find_interpreter, variables_of
from fovea_gym.environments.base import Environment
from fovea_gym.errors import ClusterError, ConfigError, FoveaError, OutOfMemoryError
from fovea_gym.settings.base import Section, packages_of
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.utils.http_json import CallBounds
from fovea_gym.utils.launch import module_command

NO_LIMITS = Limits(start_seconds=math.inf, timeout_seconds=math.inf)
"""No limits in this process: the process that makes the engine applies the engine's limits."""


def make_remote(config: Config, settings: StreamedSettings, model: Model) -> RemoteEngine:
    """Start the engine of the settings with the interpreter that they name; ConfigError if it does not start."""
    assert settings.python is not None
    here = f"rollout.engine.python={settings.python}"
    python = find_interpreter(settings.python)
    command = module_command("fovea.wiring.other_environment", python)
    payload = _payload(config, settings, model)
    try:
        process = EngineProcess(f"the engine of {settings.python}", command, payload, NO_LIMITS, variables_of(python))
    except (NotStartedError, OSError) as error:
        install = f"{settings.python} -m {pip_install_elsewhere(settings.extra)}"
        raise ConfigError(f"{here}: {error}; if Fovea or the engine is missing there: {install}") from error
    except (ClusterError, OutOfMemoryError):  # raised as they are: a supervisor restarts after their exit codes
        raise
    except FoveaError as error:
        raise ConfigError(f"{here}: {error}") from error
    return RemoteEngine(settings.name, process)


def _payload(config: Config, settings: StreamedSettings, model: Model) -> dict[str, Any]:
    """Payload for `other_environment.main` in the child: settings as JSON, with `python` unset."""
    rollout = config.rollout.model_copy(update={"engine": settings.model_copy(update={"python": None})})
    changed = {"rollout": rollout, **_in_place_of_packages(config)}
    return {
        "version": __version__,
        # not pickled, since the other environment may have another version of pydantic
        "config": config.model_copy(update=changed).model_dump(mode="json"),
        "model": model.model_dump(mode="json"),
        "gpu": torch.cuda.current_device() if torch.cuda.is_available() else None,
    }


def _in_place_of_packages(config: Config) -> dict[str, Section]:
    """Replacements for sections of other packages, which the engine does not need and its environment may lack."""
    changed: dict[str, Section] = {}
    theirs = packages_of(Config.model_fields["environment"])
    if any(each.name in theirs for each in config.environments.values()):
        changed["environment"] = ShapesEnvironment()
    if isinstance(config.algorithm.loss, HasFormula):
        changed["algorithm"] = config.algorithm.model_copy(update={"loss": ClippedLoss()})
    if config.log.tracker is not None:
        changed["log"] = config.log.model_copy(update={"tracker": None})
    return changed


SERVER_BOUNDS = CallBounds(timeout_seconds=300.0, calls_at_once=32, max_retries=5)
"""Limits of the calls to a server that `fovea eval` evaluates."""
EVALUATED_AT_ONCE = 200
"""Number of rows that an evaluation generates answers for at once."""
MIN_RECORDED_WIDTH = 128
"""Smallest width that is recorded: narrower layers are recomputed faster than their outputs are read from memory."""


def make_streamed(config: Config, settings: StreamedSettings, model: Model, processor: Processor) -> SyncedEngine:
    """Make an engine with its own weights; `model` has a path."""
    if settings.python is not None:
        return make_remote(config, settings, model)
    return settings.make(engine_access(config, model, processor))


def engine_access(config: Config, model: Model, processor: Processor) -> EngineAccess:
    """The objects and limits of the run that an engine with its own weights may use."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return EngineAccess(model=model, processor=processor, max_model_len=longest, seed=config.seed)


def make_engine(config: Config, access: EngineAccess) -> SyncedEngine | NetworkEngine:
    """Make the engine of this process."""
    settings = config.rollout.engine
    if isinstance(settings, StreamedSettings):
        return make_streamed(config, settings, access.model, access.processor)
    return settings.make(access)


def receiver_of(engine: SyncedEngine | NetworkEngine) -> WeightReceiver:
    """The receiver of an engine that does not share the policy's tensors."""
    return NetworkCopy(engine) if isinstance(engine, NetworkEngine) else engine


def connect_free_memory(policy: TrainedPolicy, engine: Engine) -> None:
    """Make the policy free the memory of an engine in its process before it resorts to smaller micro-batches."""
    if isinstance(engine, EmbeddedEngine):
        policy.set_free_memory(engine.free_memory)


def make_tape(config: Config, vlm: PolicyNetwork) -> Tape | None:
    """Make the tape that records activations of the rollout for its update; None if the update reuses none.

    It records only the vision graph if recording linear outputs does not pay or they would differ from those of the
    update, and on GPUs, where captured decode steps write to fixed addresses.
    """
    if not isinstance(vlm, VLM) or not records_rollouts(config):
        return None
    max_bytes = config.rollout.engine.kept_gib * 2**30
    if vlm.device.type != "cpu":
        return Tape([], max_bytes, vlm.dtype) if vlm.trains_vision else None
    widths = vlm.linear_widths if records_linears(config, vlm.text_config.hidden_size) else []
    return Tape(widths, max_bytes, vlm.dtype)


def records_rollouts(config: Config) -> bool:
    """True if an update may reuse activations of its rollout, provided that both run in one process."""
    # it is not known in advance what selective checkpointing keeps of a graph
    unknown = config.train.gradient_checkpointing == "selective"
    # a rollout computes its outputs without dropout
    return config.rollout.engine.kept_gib > 0 and not unknown and not config.model.has_dropout


def records_linears(config: Config, hidden_size: int) -> bool:
    """True if a CPU run also records outputs of linear layers, for a language model of this hidden size."""
    recomputes = config.train.gradient_checkpointing != "none"
    narrow = hidden_size < MIN_RECORDED_WIDTH
    inexact = not config.rollout.engine.is_exact
    # in 16 bits, recorded outputs are rounded differently from those of later passes over the same samples, and the
    # importance ratios would contain that difference
    algorithm = config.algorithm
    critic = algorithm.critic
    scored = algorithm.needs_old_logprobs or (critic is not None and critic.trunk != "separate")
    again = algorithm.ppo_epochs * algorithm.minibatches > 1 or scored
    mixed = config.model.dtype != "float32" and again
    return not (recomputes or narrow or inexact or mixed)


def make_evaluator(
    config: Config, environment: Environment, model: Answers, on_unscored: Callable[[str], None] = lambda _: None
) -> Evaluator:
    """Make the evaluator of held-out rows; `on_unscored` gets the reason for each row without a score."""
    return Evaluator(
        model,
        greedy=Sampling(
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=0.0,
            stop=config.rollout.stop,
            answer_end=answer_end_of(config, environment),
        ),
        batch_size=EVALUATED_AT_ONCE,
        image_type_key=config.evaluate.image_type_key,
        on_unscored=on_unscored,
    )
