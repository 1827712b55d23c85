"""The workflows vlm-rl-training, a PPO run from an environment's recipe or from a checkpoint, and vlm-rl-eval.

A step of the published workflow is one answer, and an episode is the answers that PPO trains on together: 10,000 steps
are 625 episodes of 16. A training step of Fovea corresponds to such an episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fovea.api.settings import TEST_SHARE, is_set, overrides_of
from fovea.api.targets import TrainedRun
from fovea.api.trainers import PPO
from fovea.commands.evaluate import EvalOptions, evaluate_targets
from fovea.commands.targets import Target, find_checkpoint, parse_target, settings_file, shared_settings
from fovea.commands.trust import check_packages, check_trust
from fovea.config.recipes import shipped_recipe
from fovea.config.sections import Rollout
from fovea.errors import ModelError
from fovea.evaluation.comparison import TargetMetrics
from fovea.evaluation.json_file import finite_json
from fovea.metrics.jsonl import METRICS_FILE
from fovea.report.about import CONFIG_FILE
from fovea.report.summary import FiguresAlongARun
from fovea.types import Metrics
from fovea.utils.torchrun import num_processes
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.rows.rows import InMemory
from fovea_gym.settings.base import Tree
from fovea_tools.workflows.inputs import (
    DEFAULT_ENVIRONMENT,
    RECIPES,
    EvaluationInputs,
    TrainingInputs,
    errors_name_inputs,
    keys_of,
    settings_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOutputs:
    """Outputs of vlm-rl-eval."""

    env_name: str
    num_episodes: int
    """Number of rows that every model answered."""
    trained_model: TargetMetrics
    """Metrics of the trained model; `versus_first` is its accuracy minus the baseline's, paired by row."""
    baseline_model: TargetMetrics | None
    """Metrics of the baseline; None if the inputs name none."""

    def to_json(self) -> dict[str, Any]:
        """The outputs by name, as JSON values."""
        values: dict[str, Any] = finite_json(asdict(self))
        return values


def evaluate(inputs: EvaluationInputs, *, trust: bool = False) -> EvaluationOutputs:
    """Evaluate greedy answers on the trained run's test rows, or for a plain model on the recipe's test rows.

    `trust` allows code that the settings in the models' folders name. Raises FoveaError, prefixed with the input that
    it is about.
    """
    names = {"baseline_model": inputs.baseline_model, "trained_model": inputs.trained_model}
    words = {name: word for name, word in names.items() if word is not None}
    targets = [_target(name, word) for name, word in words.items()]
    overrides = overrides_for(inputs)
    with errors_name_inputs(inputs):
        recipe = _recipe(inputs, targets)
        environment = shared_settings(targets, recipe, overrides, trust=trust).environment.name
        if inputs.env_name is not None and environment != inputs.env_name.replace("visual_qa", "vqa"):
            raise ConfigError(
                f"env_name: {inputs.env_name} was given, but trained_model was trained in {environment}; drop env_name"
            )
        metrics = evaluate_targets(list(words.values()), overrides, EvalOptions(recipe=recipe, trust=trust))
    by_name = dict(zip(words, metrics, strict=True))
    return EvaluationOutputs(
        env_name=environment,
        num_episodes=by_name["trained_model"].accuracy.n,
        trained_model=by_name["trained_model"],
        baseline_model=by_name.get("baseline_model"),
    )


def overrides_for(inputs: EvaluationInputs) -> list[Tree]:
    """The settings of the inputs; a value in `settings` overrides the default of num_episodes."""
    settings = settings_of(inputs, "env_name")
    size = {} if is_set("evaluate.test_size", settings) else {"evaluate.test_size": inputs.num_episodes}
    return overrides_of(settings, size)


def _target(name: str, word: str) -> Target:
    try:
        return parse_target(word)
    except (ConfigError, DataError, ModelError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _recipe(inputs: EvaluationInputs, targets: list[Target]) -> Path | None:
    """The recipe that names the rows; None if a target's folder says which rows it was trained on."""
    if any(settings_file(target) is not None for target in targets):
        return None
    return shipped_recipe(RECIPES[inputs.env_name or DEFAULT_ENVIRONMENT])


LAST_EPISODES = 100
COUNT_ANSWERS = ("total_steps", "checkpoint_interval")
"""Inputs that count answers; the settings that they stand for count training steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutputs:
    """Outputs of vlm-rl-training."""

    final_reward: float | None
    """Mean reward of the last 100 episodes; None if there is none."""
    total_steps: int
    """Number of answers that were trained on."""
    total_episodes: int
    """Number of training steps."""
    metrics_dataset: Path
    """JSON Lines file with one object of metrics per step (`python -m fovea.metrics.names`)."""
    evaluation: FiguresAlongARun | None
    """Figures on the test rows before and after training; None if the run was not evaluated at its end."""
    trained_model: Path
    """The last checkpoint, for `trained_model` of vlm-rl-eval or `resume_checkpoint` of vlm-rl-training."""
    run: Path
    """The run folder, with samples and report (docs/runs.md)."""

    def to_json(self) -> dict[str, Any]:
        """The outputs by name, as JSON values."""
        values: dict[str, Any] = finite_json(asdict(self))
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def train(inputs: TrainingInputs, rows: InMemory | None = None, *, trust: bool = False) -> TrainingOutputs:
    """Train to the last step and return the outputs; `rows` are those of `env_dataset` if they are in memory.

    `trust` allows code that the settings of the resumed run name. Raises FoveaError, prefixed with the input that it is
    about.
    """
    with errors_name_inputs(inputs):
        trainer = new_run(inputs, rows) if inputs.resume_checkpoint is None else _resumed(inputs, rows, trust=trust)
        return _outputs(trainer.train(), trainer.config.rollout)


def new_run(inputs: TrainingInputs, rows: InMemory | None) -> PPO:
    """The run that inputs without `resume_checkpoint` describe, not started; ConfigError for unfit inputs."""
    settings = _settings_of(inputs, "env_name", "env_dataset", "model_name")
    if inputs.env_dataset is not None and rows is None:
        files = {"train_files": [inputs.env_dataset], "test_files": None, "test_share": TEST_SHARE}
        settings = {f"environment.{key}": value for key, value in files.items()} | settings
    recipe = shipped_recipe(RECIPES[inputs.env_name or DEFAULT_ENVIRONMENT])
    described = PPO(recipe=recipe, model=inputs.model_name, rows=rows, settings=settings)
    settings |= _in_training_steps(inputs, described.config.rollout)
    return PPO(recipe=recipe, model=inputs.model_name, rows=rows, settings=settings)


def _settings_of(inputs: TrainingInputs, *apart: str) -> dict[str, object]:
    """The settings that the inputs stand for, on all GPUs of this machine unless they set `cluster`."""
    settings = settings_of(inputs, *COUNT_ANSWERS, *apart)
    return settings if is_set("cluster", settings) else settings | {"cluster.gpus_per_node": _gpus_for_ray()}


def _gpus_for_ray() -> int | None:
    """GPUs of this machine that get a Ray worker each; None for a single process, or for processes of torchrun."""
    num_gpus = torch.cuda.device_count()
    return num_gpus if num_gpus > 1 and num_processes() == 1 else None


def _in_training_steps(inputs: TrainingInputs, rollout: Rollout) -> dict[str, object]:
    """The settings for the inputs that count answers, converted to training steps."""
    given: Mapping[str, int | None] = {name: getattr(inputs, name) for name in COUNT_ANSWERS}
    answers = _answers_per_step(rollout)
    return {
        key: math.ceil(count / answers) for name, count in given.items() if count is not None for key in keys_of(name)
    }


def _answers_per_step(rollout: Rollout) -> int:
    return rollout.prompts_per_step * rollout.samples_per_prompt


def _resumed(inputs: TrainingInputs, rows: InMemory | None, *, trust: bool) -> PPO:
    """The run of a checkpoint with its own settings, except those that inputs override."""
    if rows is not None or inputs.env_dataset is not None:
        raise ConfigError("env_dataset: a resumed run keeps its rows; drop env_dataset, or resume_checkpoint")
    assert inputs.resume_checkpoint is not None, "called for a resume"
    try:
        checkpoint = find_checkpoint(Path(inputs.resume_checkpoint).expanduser())
    except (ConfigError, DataError) as error:
        raise ConfigError(f"resume_checkpoint: {error}") from error
    if inputs.env_name is not None:
        raise ConfigError("env_name: a resumed run keeps its environment; drop env_name, or resume_checkpoint")
    recipe = checkpoint.run / CONFIG_FILE
    place: dict[str, object] = {"resume": str(checkpoint.folder), "run_dir": str(checkpoint.run)}
    settings = _settings_of(inputs, "resume_checkpoint", "model_name")
    check_packages(recipe, overrides_of(settings), trust=trust)
    described = PPO(recipe=recipe, model=inputs.model_name, settings=place | settings)
    settings |= _in_training_steps(inputs, described.config.rollout)
    resumed = PPO(recipe=recipe, model=inputs.model_name, settings=place | settings)
    check_trust(resumed.config, recipe, overrides_of(settings), trust=trust, trains=True)
    return resumed


def _outputs(trained: TrainedRun, rollout: Rollout) -> TrainingOutputs:
    episodes = int(trained.metrics[-1]["step"]) if trained.metrics else 0
    return TrainingOutputs(
        final_reward=final_reward(trained.metrics),
        total_steps=episodes * _answers_per_step(rollout),
        total_episodes=episodes,
        metrics_dataset=trained.folder / METRICS_FILE,
        evaluation=trained.summary.get("test") if trained.summary else None,
        trained_model=find_checkpoint(trained.folder).folder,
        run=trained.folder,
    )


def final_reward(metrics: Sequence[Metrics]) -> float | None:
    """Mean reward of the last 100 episodes, or of fewer if there are fewer; None without episodes."""
    last = [row["reward"] for row in metrics[-LAST_EPISODES:]]
    return sum(last) / len(last) if last else None
