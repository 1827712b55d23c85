"""`fovea reproduce`: checks, rows, training, and the page of a published result."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fovea.config.loading import load_config, public_settings
from fovea.config.run import Config
from fovea.report.export import write_report
from fovea.report.published import DifferingSetting, PublishedJson, write_published
from fovea.run.run_dir import filled
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.settings.base import Tree, leaves
from fovea_gym.settings.splits import FileEnvironment
from fovea_gym.settings.type_text import show
from fovea_tools.data_sets.geo3k import HUB_ID, write_geo3k
from fovea_tools.plan.machine import GIB
from fovea_tools.plan.plan import advice_for, make_plan
from fovea_tools.published.catalogue import PublishedResult

CHANGED = "changed for this run"
OTHER_ROWS = ("environment.test_", "evaluate.test_size")
"""Prefixes of the settings that choose the test rows."""
OWN_PLACE = ("run_dir", "resume", "log.", "plan.", "threads")
"""Prefixes of the settings that decide where a run is stored and what it prints, not what it does."""


def published_json(result: PublishedResult, recipes: Sequence[Path], overrides: Sequence[str]) -> PublishedJson:
    """The content of published.json; `recipes` begins with the recipes of the result."""
    recipe, own = _settings(recipes[: len(result.recipes)], ()), _settings(recipes, overrides)
    changed = {key for key in {*recipe, *own} if recipe.get(key) != own.get(key) and not key.startswith(OWN_PLACE)}
    figure = result.figure
    return {
        "title": result.title,
        "source": result.source,
        "where": figure.where,
        "rows": figure.rows,
        "same_rows": figure.same_rows and not any(key.startswith(OTHER_ROWS) for key in changed),
        "bench": figure.bench,
        "before": figure.before,
        "after": figure.after,
        "curve": result.curve,
        "settings": [*_of_authors(result, own, changed), *_others(result, recipe, own, changed)],
    }


def _of_authors(result: PublishedResult, own: Tree, changed: set[str]) -> Iterator[DifferingSetting]:
    """The authors' settings from which the recipe or this run differs."""
    for each in result.settings:
        why = [each.differs, CHANGED if changed & each.ours.keys() else ""]
        if any(why):
            yield {
                "theirs": f"{each.name}={show(each.value)}",
                "recipe": _shown(each.ours),
                "run": ", ".join(show(own.get(key)) for key in each.ours),
                "why": "; ".join(filter(None, why)),
            }


def _others(result: PublishedResult, recipe: Tree, own: Tree, changed: set[str]) -> Iterator[DifferingSetting]:
    """Settings that this run changed and that the authors do not name."""
    for key in sorted(changed.difference(*(each.ours for each in result.settings))):
        shown = _shown({key: recipe.get(key)})
        yield {"theirs": f"({key} is not among theirs)", "recipe": shown, "run": show(own.get(key)), "why": CHANGED}


def _settings(recipes: Sequence[Path], overrides: Sequence[str]) -> Tree:
    return leaves(public_settings(load_config(recipes, overrides)))


def _shown(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={show(value)}" for key, value in settings.items())


GEO3K = Path("data/geo3k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A run of a published result on this machine."""

    result: PublishedResult
    recipes: Sequence[Path]
    """The result's recipes, followed by those that the user added."""
    overrides: Sequence[str]
    num_gpus: int

    @property
    def config(self) -> Config:
        return load_config(self.recipes, self.overrides)

    @property
    def command(self) -> list[str]:
        """The command that trains; with several GPUs and without Ray it starts one process per GPU."""
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.num_gpus)]
        several = self.num_gpus > 1 and self.config.cluster.gpus_per_node is None
        words = ["-m", "fovea", "train", *map(str, self.recipes), *self.overrides]
        return [sys.executable, *(launch if several else []), *words]


def prepare(result: PublishedResult, recipes: Sequence[Path], overrides: Sequence[str]) -> Reproduction:
    """The run, in runs/NAME unless its settings name another folder; a run that has begun there is resumed."""
    keys = {word.partition("=")[0] for word in overrides}
    defaults = {"run_dir": f"runs/{result.name}", "resume": "auto"}
    words = [*(f"{key}={value}" for key, value in defaults.items() if key not in keys), *overrides]
    config = load_config(recipes, words)
    folder = filled(config, time.strftime("%Y%m%d-%H%M%S"))
    return Reproduction(
        result=result,
        recipes=recipes,
        overrides=[*words, f"run_dir={folder}"],
        num_gpus=0 if config.model.device == "cpu" else torch.cuda.device_count(),
    )


def check_memory(run: Reproduction) -> None:
    """Raise ConfigError, with changes that help, if a step does not fit this machine's GPUs or the CPU's memory."""
    here = load_config(run.recipes, [*run.overrides, f"plan.gpus={max(run.num_gpus, 1)}", "plan.gpu=null"])
    planned = make_plan(here)
    if planned.fits:
        return
    name, gpu, gpus = run.result.name, planned.machine.gpu, planned.machine.gpus
    device = f"a GPU ({gpu.name}, {gpus} here)" if gpu.is_cuda else "memory on the CPU (this machine has no GPU)"
    advice = [" ".join(each.settings) for each in advice_for(here)]
    fix = f"add {' or '.join(advice[:3])}" if advice else f"the authors used {run.result.gpus}; use more or larger GPUs"
    raise ConfigError(
        f"{name}: a step needs {planned.peak.total / GIB:.0f} GiB of {device} and may use "
        f"{planned.machine.usable_bytes / GIB:.0f}; {fix}; to try it out, add a recipe: fovea reproduce {name} tiny"
    )


def fetch_rows(run: Reproduction, say: Callable[[str], None]) -> None:
    """Fetch missing rows if a command of Fovea can; DataError explains how to get others."""
    missing = list(_missing(run.config))
    by_hand = run.result.rows_by_hand
    names = " or ".join(file.name for file in missing)
    if missing and run.result.data_command and all(file.parent == GEO3K for file in missing):
        say(f"{GEO3K} has no {names}: fetching them, as `{run.result.data_command}` does ...")
        try:
            for file in write_geo3k(GEO3K, source=HUB_ID):
                say(str(file))
        except DataError as error:
            raise DataError(f"{str(error).removeprefix('--from: ')}; or {by_hand}") from error
    elif missing:
        raise DataError(f"{run.result.name}: {', '.join(map(str, missing))} not found; {by_hand}")


def _missing(config: Config) -> Iterator[Path]:
    """Missing local files of rows; hub names, patterns and addresses are not checked."""
    if isinstance(config.environment, FileEnvironment):
        splits = (config.environment.train_files, config.environment.dev_files, config.environment.test_files)
        names = (name for files in splits for name in files or () if not any(each in name for each in "@*:["))
        yield from (Path(name) for name in dict.fromkeys(names) if not Path(name).exists())


def train(run: Reproduction) -> int:
    """Train and evaluate with the run's command, and return its exit code."""
    return subprocess.run(run.command, check=False).returncode


def write_page(run: Reproduction) -> Path:
    """Write the page of the trained run with the published result, and return its path."""
    folder = Path(run.config.run_dir)
    write_published(folder, published_json(run.result, run.recipes, run.overrides))
    return write_report(folder)
