"""`fovea train --dry-run`: check everything that can fail before the model is loaded, without a run folder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.data.bad_rows import SKIP
from fovea.data.prompt_source import PromptSource, RendersPrompts
from fovea.errors import ModelError
from fovea.evaluation.chat_server import EmptyPrompts
from fovea.models.load import empty_network, pick_device
from fovea.models.model_files import WHOLE_MODEL
from fovea.models.processor import load_processor
from fovea.models.render import Renderer
from fovea.models.trainable import choose_trainable
from fovea.run.checkpoint import Checkpoints, SavedCheckpoint, read_checkpoint
from fovea.run.folder import check_run
from fovea.run.run_dir import filled, has_checkpoint
from fovea.run.signals import too_few_rows
from fovea.utils.torchrun import num_processes
from fovea.wiring.backends import placement_of
from fovea.wiring.data import make_order, make_renderer, within_epochs
from fovea.wiring.environment import make_environment
from fovea.wiring.images import make_opener
from fovea.wiring.interpreter import find_interpreter
from fovea.wiring.model import locate_model
from fovea.wiring.outputs import chosen_trackers
from fovea.wiring.trial_score import remarks_on_answers, remarks_on_images, remarks_on_shares, spread, try_reward
from fovea_gym.environments.access import GradedEnvironment
from fovea_gym.environments.base import Split
from fovea_gym.errors import DataError, FoveaError, SeveralErrors

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
INDEX_FILE = "model.safetensors.index.json"
NUM_OPENED = 32
"""Number of rows of each split to open, evenly spread: about a second in all, at 10 ms per image."""


def plan(config: Config, *, rows_per_split: int | None = NUM_OPENED) -> list[str]:
    """Describe the run line by line; raises all errors that its start would raise, at once.

    Opens rows of each split, evenly spread (None: all rows), calls the user's reward and reads all files of the model
    except its weights. Only caches of remote files are written.
    """
    problems: list[FoveaError] = []
    folder = Path(filled(config, "<time>"))
    with _noted(problems):
        check_run(folder, config)
    with _noted(problems):
        chosen_trackers(config.log)
    with _noted(problems):
        _check_packages(config)
    num_workers = config.cluster.num_ray_workers
    if not num_workers:  # the devices of a Ray cluster are on other machines
        with _noted(problems):
            pick_device(config.model.device)
    # one process does not tell the number of workers: the run may be started by torchrun with several
    if num_workers or num_processes() > 1:
        with _noted(problems):
            placement_of(config, num_workers or num_processes())
    lines: list[str] = []
    with TemporaryDirectory(prefix="fovea-dry-run-") as scratch, _noted(problems):
        # images would be fetched into the run folder
        elsewhere = config.with_own_files.model_copy(update={"run_dir": scratch})
        graded = make_environment(elsewhere)
        try:
            lines = _try_parts(elsewhere, graded, problems, rows_per_split, folder)
        finally:
            graded.grading.close()
    if len(problems) > 1:
        raise SeveralErrors(problems)
    if problems:
        raise problems[0]
    lines += _cluster(config)
    return [*lines, f"run folder: {folder}{' (resumed)' if has_checkpoint(folder) else ''}"]


@contextmanager
def _noted(problems: list[FoveaError]) -> Iterator[None]:
    """A block whose error is added to `problems`, unless it is already among them."""
    try:
        yield
    except FoveaError as error:
        if str(error) not in map(str, problems):
            problems.append(error)


def _try_parts(
    config: Config, graded: GradedEnvironment, problems: list[FoveaError], rows_per_split: int | None, folder: Path
) -> list[str]:
    """Lines about model, rows, rewards and steps of the run in `folder`; errors are added to `problems`."""
    tiny = ", to be made with random weights" if config.model.tiny else ""
    lines, tasks = [f"model: {config.model.name}{tiny}"], graded.environment.tasks
    renderer: RendersPrompts = EmptyPrompts()
    opener = make_opener(config.data, Path(config.run_dir))
    with _noted(problems):
        # a tiny model is made in the scratch folder, from the rows that can be read
        model = locate_model(config, Path(config.run_dir), lambda: graded.environment, on_bad_row="skip")
        tokens = config.rollout.max_new_tokens
        renderer = make_renderer(config.model, load_processor(model), opener, max_new_tokens=tokens)
        _check_model(model)
    for name, part in {"": graded, **graded.parts}.items():
        for split in SPLITS:
            with _noted(problems):
                rows = _rows(config, part, split, renderer, rows_per_split)
                lines.append(f"{name}, {rows}" if name else rows)
    with _noted(problems):
        lines += [*try_reward(graded, opener), *remarks_on_answers(graded), *remarks_on_shares(config, graded)]
        lines += remarks_on_images(tasks("train"), opener)
    with _noted(problems):
        make_order(config, tasks("train"))  # raises for names of kinds and levels that no row has
        lines += filter(None, [too_few_rows(len(tasks("train")), config)])
        resumed = None if config.max_epochs is None else _resumed(config, folder)
        config = within_epochs(config, partial(tasks, "train"), resumed)
    lines += [f"{key}: {', '.join(names)}, tried on a training row" for key, names in config.rewards.items()]
    return [*lines, _steps(config)]


def _resumed(config: Config, folder: Path) -> SavedCheckpoint | None:
    """The checkpoint from which the run in a folder would resume; None if it would start."""
    if config.resume_from is not None:
        return read_checkpoint(config.resume_from)
    return Checkpoints(folder, config.checkpoint.keep).latest() if config.resume == "auto" else None


def _check_packages(config: Config) -> None:
    """MissingExtraError or ConfigError if a backend is not installed, or if its interpreter is missing."""
    # the error of each import says what to install
    if config.cluster.num_ray_workers:
        importlib.import_module("fovea.cluster.ray")
        return  # the machines of a Ray cluster have their own environments
    if not config.train.backend.shares_network:
        importlib.import_module("fovea.train.megatron")
    engine = config.rollout.engine
    if engine.interpreter is not None:
        # the engine is installed in another environment
        find_interpreter(engine.interpreter)
    elif engine.extra is not None:
        importlib.import_module("fovea.rollout." + engine.extra)


def _cluster(config: Config) -> list[str]:
    """The use of a Ray cluster's GPUs, and what only its machines can check."""
    cluster, num_gpus = config.cluster, config.cluster.num_ray_workers
    if not num_gpus:
        with_one: list[FoveaError] = []
        with _noted(with_one):
            placement_of(config, num_processes())
        return [f"not checked: the number of processes; with one, {error}" for error in with_one]
    placement = placement_of(config, num_gpus)
    return [
        f"cluster: {cluster.num_nodes} x {cluster.gpus_per_node} GPUs, of which {placement.num_learners} train and "
        f"{len(placement.engines(range(num_gpus)))} generate (cluster.placement={cluster.placement}); its start checks "
        "that the Ray cluster has that many, and the engine's packages on them"
    ]


def _check_model(model: Model) -> None:
    """ModelError for missing weight files, ConfigError for parts to train that the network lacks."""
    index = Path(str(model.path), INDEX_FILE)
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(name for name in files if not index.with_name(name).is_file())
        if missing:
            raise ModelError(
                f"model.path={model.path}: {len(missing)} files are missing, first {missing[0]}; {WHOLE_MODEL}"
            )
    with torch.device("meta"):
        choose_trainable(empty_network(model), model, seed=0)


def _rows(
    config: Config, graded: GradedEnvironment, split: Split, renderer: RendersPrompts, num_opened: int | None
) -> str:
    """The number of rows of a split, and the longest prompt among those opened; DataError for bad rows."""
    tasks = graded.environment.tasks(split)
    opened = range(len(tasks)) if num_opened is None else spread(len(tasks), num_opened)
    source = PromptSource(
        tasks,
        graded.environment,
        renderer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        on_bad_row="skip",  # a run may end at the first bad row, but here all are counted
        cache_gib=0.0,
    )
    lengths, answers = list[int](), [0]
    for index in opened:
        if (row := source.get(index)) is None:
            continue
        lengths.append(row.prompt.num_tokens)
        if config.warmup is not None and split == "train" and isinstance(renderer, Renderer):
            where = f"a demonstration of {row.task.id}"
            # of an episode with replies, whose later prompts are longer, this is a lower bound
            texts = graded.environment.demonstration(row.task)
            answers += [len(renderer.demonstration(row.prompt, text, where)) for text in texts]
    bad = list(source.bad_rows.values())
    if bad and (config.data.on_bad_row == "error" or (split == "train" and not lengths)):
        first = f"{bad[0]}, or {SKIP}" if config.data.on_bad_row == "error" else bad[0]
        raise DataError(f"{split}: {len(bad)} of the {len(opened)} rows opened cannot be used, the first: {first}")
    rows = f"{split}: {len(tasks):,} rows"
    if bad:
        return (
            f"{rows}; {len(bad)} of the {len(opened)} opened cannot be used, and data.on_bad_row=skip leaves them out"
        )
    if config.model.path and lengths:
        rows += f"; the longest prompt of the {len(opened)} opened has {max(lengths):,} tokens"
    if max(answers) > config.rollout.max_new_tokens:
        rows += (
            f"; the longest answer that the warm-up imitates has {max(answers):,} tokens, which "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} cuts when RL samples it"
        )
    return rows


def _steps(config: Config) -> str:
    rollout = config.rollout
    return (
        f"{config.algorithm.name}: {config.max_steps:,} steps of {rollout.prompts_per_step} prompts with "
        f"{rollout.samples_per_prompt} completions each, of at most {rollout.max_new_tokens} tokens"
    )
