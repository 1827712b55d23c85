"""The workflow vlm-rl-eval: a trained model and a baseline answer the same rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fovea.api.settings import is_set, overrides_of
from fovea.build.targets import Target, parse_target, settings_file, shared_settings
from fovea.config.base import Tree
from fovea.config.recipes import shipped_recipe
from fovea.errors import ConfigError, DataError, ModelError
from fovea.eval_targets import OutputFiles, evaluate_targets
from fovea.evaluation.comparison import TargetMetrics
from fovea.evaluation.json_file import finite_json
from fovea.workflows.inputs import DEFAULT_ENVIRONMENT, RECIPES, EvaluationInputs, errors_name_inputs, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOutputs:
    """What vlm-rl-eval returns."""

    env_name: str
    num_episodes: int
    """Rows that every model answered."""
    trained_model: TargetMetrics
    """Its `versus_first` is its accuracy minus that of the baseline, paired by row."""
    baseline_model: TargetMetrics | None
    """None where none was named."""

    def to_json(self) -> dict[str, Any]:
        """The outputs by name as JSON has them."""
        values: dict[str, Any] = finite_json(asdict(self))
        return values


def evaluate(inputs: EvaluationInputs, *, trust: bool = False) -> EvaluationOutputs:
    """Evaluate by greedy answers on the test rows of the trained run; for a plain model, on those of the recipe.

    `trust` lets the code run that the settings of the models' own folders name. Raises FoveaError, with the input in
    front where the error is about one.
    """
    names = {"baseline_model": inputs.baseline_model, "trained_model": inputs.trained_model}
    words = {name: word for name, word in names.items() if word is not None}
    targets = [_target(name, word) for name, word in words.items()]
    overrides = overrides_for(inputs)
    with errors_name_inputs(inputs):
        recipe = _recipe(inputs, targets)
        environment = shared_settings(targets, recipe, overrides, trust=trust).environment.name
        if inputs.env_name is not None and environment != _environment(inputs.env_name):
            raise ConfigError(
                f"env_name: {inputs.env_name} was given, but trained_model was trained in {environment}; drop env_name"
            )
        metrics = evaluate_targets(
            list(words.values()), overrides, recipe=recipe, split="test", output_files=OutputFiles(), trust=trust
        )
    by_name = dict(zip(words, metrics, strict=True))
    return EvaluationOutputs(
        env_name=environment,
        num_episodes=by_name["trained_model"].accuracy.n,
        trained_model=by_name["trained_model"],
        baseline_model=by_name.get("baseline_model"),
    )


def overrides_for(inputs: EvaluationInputs) -> list[Tree]:
    """The settings of the inputs; the default of num_episodes gives way to `settings`."""
    settings = settings_of(inputs, "env_name")
    size = {} if is_set("evaluate.test_size", settings) else {"evaluate.test_size": inputs.num_episodes}
    return overrides_of(settings, size)


def _target(name: str, word: str) -> Target:
    try:
        return parse_target(word)
    except (ConfigError, DataError, ModelError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _recipe(inputs: EvaluationInputs, targets: list[Target]) -> Path | None:
    """The recipe with the rows; None where the folder of a target says which rows it was trained on."""
    if any(settings_file(target) is not None for target in targets):
        return None
    return shipped_recipe(RECIPES[inputs.env_name or DEFAULT_ENVIRONMENT])


def _environment(env_name: str) -> str:
    return "vqa" if env_name == "visual_qa" else env_name
