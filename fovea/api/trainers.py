"""`fovea.GRPO` and `fovea.PPO`: a run from Python, with the settings of a recipe as arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Never

from typing_extensions import Unpack

from fovea.api.settings import (
    RewardArgument,
    RowsArgument,
    RowsArguments,
    Settings,
    ToolsArgument,
    code_settings,
    given_code,
    is_set,
    model_settings,
    overrides_of,
)
from fovea.api.targets import Recipe, Target, TrainedRun, evaluate, export, load_run, recipe_files, restored_threads
from fovea.commands.exporting.export import Exported, check_empty
from fovea.config.loading import environment_of, load_run_config
from fovea.config.run import Config
from fovea.evaluation.comparison import TargetMetrics
from fovea.loop import train
from fovea.run.callbacks import Callbacks, OnEval, OnStep
from fovea.run.run_dir import has_checkpoint
from fovea.utils.torchrun import check_torchrun, is_worker
from fovea.wiring.given import check_takes_rows
from fovea.wiring.run import build
from fovea.wiring.workers import serve_driver
from fovea_gym.environments.base import Split
from fovea_gym.errors import ConfigError
from fovea_gym.rows.rows import InMemory
from fovea_gym.settings.base import Tree


class Trainer:
    """A run that has been described but not started: `GRPO` or `PPO`.

    All settings are checked here, before anything is loaded. Raises ConfigError (a FoveaError), which says what was
    set, why it fails and the fix.
    """

    _name: ClassVar[str]
    _choice: ClassVar[Sequence[Tree]] = ()
    """Overrides that choose the algorithm; the user's overrides take precedence."""

    def __init__(  # noqa: PLR0913 (each is a part of a run that has a separate name)
        self,
        *unnamed: Never,
        model: str | os.PathLike[str] | Mapping[str, object] | None = None,
        recipe: Recipe | Sequence[Recipe] | None = None,
        environment: Any = None,
        rows: RowsArgument = None,
        test_rows: RowsArgument = None,
        dev_rows: RowsArgument = None,
        reward: RewardArgument = None,
        tools: ToolsArgument = (),
        on_step: OnStep | None = None,
        on_eval: OnEval | None = None,
        settings: Mapping[str, object] | None = None,
        **more: Unpack[Settings],
    ) -> None:
        """Describe a run.

        * `model`: a path or Hub id, or the section `model` of a recipe, such as `{"tiny": {}}`.
        * `recipe`: a YAML file to start from, a name that `fovea recipes` lists, or a list of these, of which later
          ones win; the arguments win over all.
        * `environment`: its name, `path/to/file.py:Class`, the section `environment`, or an object (docs/own.md).
        * `rows`: a pandas DataFrame, a `datasets.Dataset`, a list of mappings, a mapping of columns, or the name of a
          file or data set (`train.parquet`, `owner/name@train`) or a list of names, to train on. With your own reward
          the environment is `rows`; otherwise choose an environment that grades (`vqa`, `geo3k`, `caption`, `geospot`).
          The section `environment` names columns (`prompt_key`, `image_key`, ...). Rows in memory are written into the
          run folder.
        * `test_rows`, `dev_rows`: held-out rows; by default shares of `rows`, split by image.
        * `reward`: a function of a task, a text and images, plain or async, a function with TRL's signature,
          or `path/to/file.py:function`; or a list of these, whose sum, weighted by `reward_weights`, is the reward.
        * `tools`: what the model may call in the turns of an episode: functions with types and a docstring, or names of
          `environment.tools` (docs/agents.md).
        * `on_step`, `on_eval`: called with a `StepRecord` after each step, and an `EvalRecord` after each evaluation.
        * `settings` and further arguments: settings under their names in a recipe, dotted (in `settings`) or nested.
        """
        if unnamed:
            raise ConfigError(
                f"fovea.{self._name} is given {len(unnamed)} arguments without a name; name each: "
                f"fovea.{self._name}(model='Qwen/Qwen3-VL-2B-Instruct', rows=frame, reward=function)"
            )
        self._callbacks = Callbacks(on_step=on_step, on_eval=on_eval)
        self._callbacks.check()
        described = {**model_settings(model), **code_settings(environment, reward, tools)}
        further = {} if settings is None else settings
        rows_given = RowsArguments(rows=rows, test_rows=test_rows, dev_rows=dev_rows)
        rows_given.check()
        others = (described, further, more)
        self._recipes = recipe_files(recipe)
        grader = _grader(rows, self._recipes, reward, others)
        self._frames = rows_given.frames
        self._code, self._reward, self._tools = given_code(environment, reward, tools), reward, tools
        if rows is not None:
            check_takes_rows(environment_of(self._recipes, overrides_of(*others, grader)))
        made = {**rows_given.settings(*others), **grader}
        self._folder: Path | None = None
        overrides = [*self._choice, *overrides_of(described, further, more, made)]
        self.config: Config = self._checked(load_run_config(self._recipes, overrides))
        if rows is None and not self._recipes and not is_set("environment", *others):
            raise ConfigError(
                f"fovea.{self._name} is given nothing to train on; give rows=frame and reward=function, an environment "
                "such as environment='shapes' (docs/environments.md), or a recipe such as recipe='shapes' "
                "(`fovea recipes`)"
            )

    def train(self, *, export_to: str | os.PathLike[str] | None = None) -> TrainedRun:
        """Train from the start, or with `resume="auto"` from the newest checkpoint, to the end.

        Works in a script and in a notebook. Ctrl-C, or the stop button, lets the running step end, saves it and raises
        KeyboardInterrupt; a second one ends it at once. `export_to` exports the model to that folder at the end. In all
        processes of torchrun except the first, it works for the first one and then ends the process. Raises FoveaError.
        """
        check_torchrun()
        if is_worker():
            serve_driver()
            raise SystemExit(0)
        if export_to is not None:
            check_empty(Path(export_to))
        with restored_threads():
            run = build(self.config, self._code.environment, self._frames, self._code.rewards, self._code.tools)
            self._folder = run.folder
            try:
                train(replace(run, callbacks=self._callbacks))
            except SystemExit as end:  # the time limit, or a signal
                if end.code:
                    raise
        trained = load_run(run.folder)
        return trained if export_to is None else replace(trained, model=self.export(export_to).folder)

    def evaluate(
        self,
        *others: Target,
        split: Split = "test",
        rows: InMemory | None = None,
        settings: Mapping[str, object] | None = None,
        html_file: str | os.PathLike[str] | None = None,
        quiet: bool = False,
    ) -> list[TargetMetrics]:
        """Evaluate the newest checkpoint of the run together with other targets, as `fovea.evaluate` does."""
        return evaluate(
            self.folder,
            *others,
            split=split,
            rows=rows,
            reward=self._reward,
            environment=self._code.environment,
            tools=self._tools,
            settings=settings,
            html_file=html_file,
            trust=True,
            quiet=quiet,
        )

    def export(self, folder: str | os.PathLike[str], *, adapter_only: bool = False) -> Exported:
        """Export the newest checkpoint of the run to a new folder, as `fovea.export` does."""
        return export(self.folder, folder, adapter_only=adapter_only, trust=True)

    @property
    def folder(self) -> Path:
        """The folder of the run; ConfigError before the run has one."""
        folder = self._folder or Path(self.config.run_dir)
        if not has_checkpoint(folder):
            raise ConfigError("nothing has been trained yet; call train(), or set run_dir to the folder of a run")
        return folder

    def _checked(self, config: Config) -> Config:
        has_critic = config.algorithm.critic is not None
        if has_critic != (self._name == "PPO"):
            has, other = ("a value function", "PPO") if has_critic else ("no value function", "GRPO")
            raise ConfigError(
                f"algorithm.name={config.algorithm.name} with advantage={config.algorithm.advantage.name} has {has}; "
                f"use fovea.{other}, or set another algorithm.name"
            )
        if config.max_restarts:
            raise ConfigError(
                f"max_restarts={config.max_restarts} restarts the command `fovea train`, but this is another "
                "program; set max_restarts=0, or use the command"
            )
        return config


class GRPO(Trainer):
    """Group-relative policy optimisation, or one of its variants (`algorithm={"name": "dapo"}`, docs/algorithms.md).

    `fovea.GRPO(model="Qwen/Qwen3-VL-2B-Instruct", rows=frame, reward=score, max_steps=100).train()`
    """

    _name = "GRPO"


class PPO(Trainer):
    """Proximal policy optimisation with a value function (docs/algorithms.md), otherwise as `GRPO`."""

    _name = "PPO"
    _choice = ({"algorithm": {"name": "ppo"}},)


def _grader(
    rows: RowsArgument, recipes: Sequence[Path], reward: RewardArgument, others: tuple[Mapping[str, object], ...]
) -> dict[str, object]:
    """The environment for rows if none is named."""
    named = is_set("environment.name", *others) or any(isinstance(each.get("environment"), str) for each in others)
    if rows is None or recipes or named:
        return {}
    if reward is None and not is_set("reward", *others):
        # a misspelt name, such as TRL's reward_funcs, gets a more helpful error
        some_rows = {"environment.name": "vqa", "environment.train_files": [], "environment.test_files": []}
        load_run_config(recipes, overrides_of(*others, some_rows))
        raise ConfigError(
            "rows are given, but nothing that grades their answers; give reward=function, or environment='vqa', "
            "'geo3k', 'caption' or 'geospot', which have their own graders (docs/environments.md)"
        )
    return {"environment.name": "rows"}
