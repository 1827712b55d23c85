"""The workflow vlm-rl-training: a run of PPO from the recipe of an environment, or on from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fovea.api.rows import TEST_SHARE
from fovea.api.runs import TrainedRun
from fovea.api.settings import overrides_of
from fovea.api.trainers import PPO
from fovea.build.targets import find_checkpoint
from fovea.build.trust import check_trust
from fovea.config.recipes import shipped_recipe
from fovea.config.run import Config
from fovea.data.rows import InMemory
from fovea.errors import ConfigError, DataError
from fovea.evaluation.json_file import finite_json
from fovea.metrics.jsonl import METRICS_FILE
from fovea.report.about import CONFIG_FILE
from fovea.report.summary import FiguresAlongARun
from fovea.types import Metrics
from fovea.workflows.inputs import DEFAULT_ENVIRONMENT, RECIPES, TrainingInputs, errors_name_inputs, settings_of

LAST_EPISODES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutputs:
    """What vlm-rl-training returns."""

    final_reward: float | None
    """Mean reward of the last 100 episodes; None before the first step."""
    total_steps: int
    total_episodes: int
    metrics_dataset: Path
    """JSON Lines, one object of metrics for each step (docs/metrics.md)."""
    evaluation: FiguresAlongARun | None
    """Figures on the test rows before and after training; None for a run that its time limit ended."""
    trained_model: Path
    """The last checkpoint: `trained_model` of vlm-rl-eval, `resume_checkpoint` of vlm-rl-training."""
    run: Path
    """The run folder, with samples and report (docs/runs.md)."""

    def to_json(self) -> dict[str, Any]:
        """The outputs by name as JSON has them."""
        values: dict[str, Any] = finite_json(asdict(self))
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def train(inputs: TrainingInputs, rows: InMemory | None = None, *, trust: bool = False) -> TrainingOutputs:
    """Train to the last step and return its figures; `rows` are those of `env_dataset` where they are in memory.

    `trust` lets the run of `resume_checkpoint` run the code that its own settings name. Raises FoveaError, with the
    input in front where the error is about one.
    """
    with errors_name_inputs(inputs):
        trainer = _started(inputs, rows) if inputs.resume_checkpoint is None else _resumed(inputs, rows, trust=trust)
        return _outputs(trainer.train(), trainer.config)


def _started(inputs: TrainingInputs, rows: InMemory | None) -> PPO:
    settings = settings_of(inputs, "env_name", "env_dataset", "model_name")
    if inputs.env_dataset is not None and rows is None:
        files = {"train_files": [inputs.env_dataset], "test_files": None, "test_share": TEST_SHARE}
        settings = {f"environment.{key}": value for key, value in files.items()} | settings
    recipe = shipped_recipe(RECIPES[inputs.env_name or DEFAULT_ENVIRONMENT])
    return PPO(recipe=recipe, model=inputs.model_name, rows=rows, settings=settings)


def _resumed(inputs: TrainingInputs, rows: InMemory | None, *, trust: bool) -> PPO:
    """The run of a checkpoint with its own settings, but for those that inputs are given for."""
    if rows is not None or inputs.env_dataset is not None:
        raise ConfigError("env_dataset: a run goes on with its own rows; drop env_dataset, or resume_checkpoint")
    assert inputs.resume_checkpoint is not None, "called for a resume"
    try:
        checkpoint = find_checkpoint(Path(inputs.resume_checkpoint).expanduser())
    except (ConfigError, DataError) as error:
        raise ConfigError(f"resume_checkpoint: {error}") from error
    if inputs.env_name is not None:
        raise ConfigError("env_name: a run goes on in its own environment; drop env_name, or resume_checkpoint")
    settings = settings_of(inputs, "resume_checkpoint", "model_name")
    place: dict[str, object] = {"resume": str(checkpoint.folder), "run_dir": str(checkpoint.run)}
    resumed = PPO(recipe=checkpoint.run / CONFIG_FILE, model=inputs.model_name, settings=place | settings)
    check_trust(resumed.config, checkpoint.run / CONFIG_FILE, overrides_of(settings), trust=trust, trains=True)
    return resumed


def _outputs(trained: TrainedRun, config: Config) -> TrainingOutputs:
    episodes_per_step = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    total_steps = int(trained.metrics[-1]["step"]) if trained.metrics else 0
    return TrainingOutputs(
        final_reward=final_reward(trained.metrics, episodes_per_step),
        total_steps=total_steps,
        total_episodes=total_steps * episodes_per_step,
        metrics_dataset=trained.folder / METRICS_FILE,
        evaluation=trained.summary.get("test") if trained.summary else None,
        trained_model=find_checkpoint(trained.folder).folder,
        run=trained.folder,
    )


def final_reward(metrics: Sequence[Metrics], episodes_per_step: int) -> float | None:
    """Mean reward of the last 100 episodes, of fewer where there are no more; None without any.

    The episodes of a step come at once, in no order, so that the mean of a step stands for each of its episodes.
    """
    left, total = LAST_EPISODES, 0.0
    for row in reversed(metrics):
        taken = min(left, episodes_per_step)
        total, left = total + taken * row["reward"], left - taken
    return total / (LAST_EPISODES - left) if left < LAST_EPISODES else None
