"""`fovea.load_run`, `fovea.evaluate` and `fovea.export`: runs read from folders, and the two commands from Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch

from fovea.api.settings import ASKED, RewardArgument, ToolsArgument, code_settings, given_code, overrides_of
from fovea.commands.evaluate import EvalOptions, evaluate_targets
from fovea.commands.exporting.export import Exported
from fovea.commands.exporting.export import export as export_model
from fovea.config.recipes import find_recipe
from fovea.evaluation.comparison import TargetMetrics
from fovea.metrics.log import read_metrics
from fovea.report.about import CONFIG_FILE, SUMMARY_FILE, check_run_folder
from fovea.report.summary import SummaryJson, read_summary
from fovea.types import Metrics
from fovea_gym.environments.base import Split
from fovea_gym.errors import ConfigError
from fovea_gym.rows.rows import InMemory

Recipe: TypeAlias = str | os.PathLike[str]
"""A YAML file, or the name of a recipe that comes with Fovea."""


def recipe_files(recipe: Recipe | Sequence[Recipe] | None) -> list[Path]:
    """The files of one or several recipes, of which later ones win; ConfigError for any other type."""
    words: Sequence[object] = [] if recipe is None else recipe if isinstance(recipe, list | tuple) else [recipe]
    return [find_recipe(_checked(word)) for word in words]


def _checked(word: object) -> Recipe:
    if isinstance(word, str | os.PathLike):
        return word
    raise ConfigError(
        f"recipe is given an object of type {type(word).__name__}; give a YAML file, a name that `fovea recipes` "
        "lists, or a list of them; settings in memory go into the argument settings"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A run, as returned by `train()` or read by `load_run` from its folder; the run may still be going."""

    folder: Path
    """The run folder, with its settings, samples, checkpoints and report (docs/runs.md)."""
    metrics: list[Metrics]
    """The metrics of every step by name, including `step`: `pandas.DataFrame(run.metrics)`.

    `python -m fovea.metrics.names` explains each.
    """
    summary: SummaryJson | None
    """Results on the test rows before and after training; None for a run that has not ended."""
    model: Path | None = None
    """The folder that the model was exported to at the end of training; None if no export was requested."""

    @property
    def config_file(self) -> Path:
        """All settings of the run, as a recipe."""
        return self.folder / CONFIG_FILE


def load_run(folder: str | os.PathLike[str]) -> TrainedRun:
    """Read a run from its folder; DataError if the folder has no run."""
    path = Path(folder)
    check_run_folder(path)
    summary = path / SUMMARY_FILE
    return TrainedRun(
        folder=path,
        metrics=read_metrics(path),
        summary=read_summary(summary) if summary.is_file() else None,
    )


Target: TypeAlias = str | os.PathLike[str] | TrainedRun


@contextmanager
def restored_threads() -> Iterator[None]:
    """Restore torch's number of threads, which the setting `threads` changes, at the end of the block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evaluate(  # noqa: PLR0913 (each is an option of the command)
    *targets: Target,
    recipe: Recipe | None = None,
    split: Split = "test",
    rows: InMemory | None = None,
    reward: RewardArgument = None,
    environment: Any = None,
    tools: ToolsArgument = (),
    settings: Mapping[str, object] | None = None,
    json_file: str | os.PathLike[str] | None = None,
    html_file: str | os.PathLike[str] | None = None,
    api_key_env: str | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> list[TargetMetrics]:
    """Evaluate targets on the same rows with the same grader; prints tables and returns their contents.

    A target is a run, one of its checkpoints, a model folder or Hub id, the address of a server, or one of the
    baselines `majority`, `gold` and `constant:TEXT`. Rows and grader come from the recipe, or from the first target
    that is a run. A run that was trained with a function or an object needs the same one again, as `reward`,
    `environment` or `tools`. `rows` (a DataFrame, a Dataset, a list of mappings or a mapping of columns) replace the
    test split; with a `reward`, or an `environment` that grades, they need neither recipe nor run. `settings` are those
    of a recipe, such as `{"evaluate.samples_per_prompt": 8}`. With `trust`, code files that a run's own settings name
    are run, and their judge is called (docs/evaluation.md). Raises FoveaError.
    """
    if not targets:
        raise ConfigError(
            "nothing to evaluate; give a run, a checkpoint, a model, a server or a baseline such as 'gold'"
        )
    if split not in get_args(Split):
        raise ConfigError(f"split={split!r} is not a split; give {', '.join(map(repr, get_args(Split)))}")
    if rows is not None and split != "test":
        raise ConfigError(f"split={split!r} names rows, but rows gives others; leave one of the two out")
    files = recipe_files(recipe)
    if len(files) > 1:
        raise ConfigError(
            f"recipe names {len(files)} recipes, but fovea.evaluate accepts one; give the others as settings={{...}}"
        )
    options = EvalOptions(
        recipe=files[0] if files else None,
        split=split,
        json_file=None if json_file is None else Path(json_file),
        html_file=None if html_file is None else Path(html_file),
        trust=trust,
        api_key_env=api_key_env,
        quiet=quiet,
    )
    made = {} if rows is None else ASKED
    overrides = overrides_of(code_settings(environment, reward, tools), {} if settings is None else settings, made)
    words = [_word(target, "evaluate") for target in targets]
    with restored_threads():
        return evaluate_targets(words, overrides, options, given=given_code(environment, reward, tools), rows=rows)


def export(
    source: str | os.PathLike[str] | TrainedRun,
    folder: str | os.PathLike[str],
    *,
    adapter_only: bool = False,
    settings: Mapping[str, object] | None = None,
    trust: bool = False,
) -> Exported:
    """Write the model of a run or checkpoint to a new folder in transformers' format, load it again and compare.

    `adapter_only` writes a LoRA adapter in peft's format instead of the merged model (docs/export.md). Raises
    FoveaError.
    """
    overrides = overrides_of({} if settings is None else settings)
    return export_model(
        Path(_word(source, "export")), Path(folder), adapter_only=adapter_only, overrides=overrides, trust=trust
    )


def _word(target: Target, function: str) -> str:
    if isinstance(target, TrainedRun):
        return str(target.folder)
    if not isinstance(target, str | os.PathLike):
        raise ConfigError(
            f"fovea.{function} is given an object of type {type(target).__name__}; give the run that train() returned, "
            f"or a folder or name as text; for a trainer call its own {function}(), and save a model in memory first "
            "(save_pretrained)"
        )
    return os.fspath(target)
