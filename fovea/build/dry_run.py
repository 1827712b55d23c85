"""`fovea train --dry-run`: all that can go wrong before a model is loaded, tried without a run folder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fovea.build.data import make_opener, make_order, within_epochs
from fovea.build.environment import GradedEnvironment, make_environment
from fovea.build.interpreter import find_interpreter
from fovea.build.trackers import chosen_trackers
from fovea.build.trial_score import MAX_ROWS_TRIED, remarks_on_answers, try_reward
from fovea.config.backends import EmbeddedEngine, SglangEngine, VllmEngine, VllmServersEngine
from fovea.config.run import Config
from fovea.environments.base import Environment, Split
from fovea.environments.prompt_source import PromptSource, RendersPrompts
from fovea.errors import ModelError
from fovea.evaluation.chat_server import EmptyPrompts
from fovea.models.model_files import WHOLE_MODEL
from fovea.models.processor import load_processor
from fovea.models.render import Renderer
from fovea.run.folder import check_run
from fovea.run.run_dir import filled, has_checkpoint
from fovea.types import Prompt, Task

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
INDEX_FILE = "model.safetensors.index.json"


def plan(config: Config) -> list[str]:
    """What the run would do, line by line; raises what the run itself would.

    Counts rows, renders the first of each split, calls the user's reward and reads all files of the model but its
    weights. Nothing is written but caches of remote files.
    """
    folder = Path(filled(config, "<time>"))
    check_run(folder, config)
    chosen_trackers(config.log)
    _check_engine(config)
    with TemporaryDirectory(prefix="fovea-dry-run-") as scratch:
        # images are fetched into the run folder
        elsewhere = config.with_own_files.model_copy(update={"run_dir": scratch})
        graded = make_environment(elsewhere)
        try:
            lines = [_model(config), *(_rows(elsewhere, graded, split) for split in SPLITS)]
            for name, part in graded.parts.items():
                lines += [f"{name}, {_rows(elsewhere, part, split)}" for split in SPLITS]
            try_reward(graded)
            lines += remarks_on_answers(graded)
            make_order(elsewhere, graded.environment.tasks("train"))  # names of kinds and levels that no row has
        finally:
            graded.grading.close()
    lines += [f"{key}: {reward}, tried on a training row" for key, reward in config.rewards.items()]
    config = within_epochs(config, partial(graded.environment.tasks, "train"))
    return [*lines, _steps(config), f"run folder: {folder}{' (resumed)' if has_checkpoint(folder) else ''}"]


def _check_engine(config: Config) -> None:
    """Raises MissingExtraError where the engine is not installed, ConfigError where its interpreter is missing."""
    # the machines of a Ray cluster have environments of their own
    if config.cluster.num_ray_workers:
        return
    engine = config.rollout.engine
    if not isinstance(engine, EmbeddedEngine) and engine.python is not None:
        # this environment need not have the engine of another
        find_interpreter(engine.python)
        return
    # the import says what has to be installed
    match engine:
        case VllmEngine() | VllmServersEngine():
            importlib.import_module("fovea.rollout.vllm")
        case SglangEngine():
            importlib.import_module("fovea.rollout.sglang")
        case EmbeddedEngine():
            pass


def _model(config: Config) -> str:
    path = config.model.path
    if path is None:
        return f"model: {config.model.name}, to be made with random weights"
    family = load_processor(config.model).family
    index = Path(path, INDEX_FILE)
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(name for name in files if not index.with_name(name).is_file())
        if missing:
            raise ModelError(f"model.path={path}: {len(missing)} files are missing, first {missing[0]}; {WHOLE_MODEL}")
    return f"model: {path}, {type(family).__name__}"


def _rows(config: Config, graded: GradedEnvironment, split: Split) -> str:
    """The number of rows of a split, and the length of its first prompt where there is a tokenizer already."""
    environment = graded.environment
    tasks = environment.tasks(split)
    rows = f"{split}: {len(tasks):,} rows"
    num_tried = min(len(tasks), MAX_ROWS_TRIED)
    first = _first_prompt(config, environment, tasks, num_tried)
    if first is None and num_tried:
        return f"{rows}; none of the first {num_tried} can be used, and data.on_bad_row=skip leaves them out"
    if first is None or config.model.path is None:
        return rows
    return f"{rows}; the first prompt has {first.num_tokens:,} tokens, images included"


def _first_prompt(config: Config, environment: Environment, tasks: Sequence[Task], num_tried: int) -> Prompt | None:
    """The prompt of the first row of these that can be used, empty without a tokenizer yet; None where none can."""
    limits = {"min_pixels": config.model.min_pixels, "max_pixels": config.model.max_pixels}
    renderer: RendersPrompts = EmptyPrompts()
    if config.model.path is not None:
        opener = make_opener(config.data, Path(config.run_dir))
        renderer = Renderer(load_processor(config.model), opener, **limits)
    source = PromptSource(
        tasks,
        environment,
        renderer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        on_bad_row=config.data.on_bad_row,
        cache_gib=0.0,
    )
    found = (source.get(index) for index in range(num_tried))
    return next((row.prompt for row in found if row is not None), None)


def _steps(config: Config) -> str:
    rollout = config.rollout
    return (
        f"{config.algorithm.name}: {config.max_steps:,} steps of {rollout.prompts_per_step} prompts with "
        f"{rollout.samples_per_prompt} completions each, of at most {rollout.max_new_tokens} tokens"
    )
