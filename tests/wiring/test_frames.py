"""Rows given from Python train in every environment that has rows, by the same settings as rows in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import datasets
import pandas as pd
import pytest
from PIL import Image

from fovea.config.run import Config
from fovea.data.rows import InMemory
from fovea.environments.base import Split
from fovea.errors import ConfigError, DataError
from fovea.wiring.environment import make_environment
from fovea.wiring.given import rows_as_files
from fovea.wiring.images import make_opener
from fovea.wiring.run import build

Rows = Sequence[Mapping[str, object]]

QUESTION = {"question": "<image>Which?", "answer": "red"}
PLACE = {"country": "France", "city": "Paris", "lat": 48.86, "lon": 2.35}


def config_of(name: str, **settings: object) -> Config:
    environment = {"name": name, "train_files": [], "test_files": []} if name != "shapes" else {"name": name}
    return Config.model_validate({"model": {"tiny": {}}, "environment": environment, **settings})


def as_columns(rows: Rows) -> InMemory:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("form", [pd.DataFrame, list, as_columns, lambda rows: datasets.Dataset.from_list(list(rows))])
@pytest.mark.parametrize(
    ("name", "row"), [("geo3k", QUESTION), ("vqa", QUESTION), ("caption", QUESTION), ("geospot", PLACE)]
)
def test_every_environment_of_rows_takes_them_from_python(
    name: str, row: Mapping[str, object], form: Callable[[Rows], InMemory], tmp_path: Path
) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "b.png")
    rows = form([{**row, "image": "a.png"}, {**row, "image": "b.png"}])
    data = {"image_root": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    config = config_of(name, data=data, run_dir=str(tmp_path / "run"))
    with rows_as_files(config, {"train": rows, "dev": rows, "test": rows}) as written:
        written.move_into(tmp_path / "run")
    environment = make_environment(written.config).environment
    open_image = make_opener(config.data, tmp_path)
    tasks = environment.tasks("train")
    assert len(tasks) == len(environment.tasks("dev")) == len(environment.tasks("test")) == 2
    colours = [open_image(ref).getpixel((0, 0)) for task in tasks for ref in task.images]
    assert colours == [(255, 0, 0), (0, 0, 255)]
    assert environment.target(tasks[1])


def test_a_run_of_rows_from_python(tmp_path: Path) -> None:
    """`build` writes them into the run folder, and a file may stand for one of the splits."""
    rows = [{**QUESTION, "image": Image.new("RGB", (32, 32), colour)} for colour in ("red", "blue", "green")]
    Image.new("RGB", (32, 32)).save(tmp_path / "x.png")
    (tmp_path / "test.csv").write_text("question,answer,image\n<image>Which?,red,x.png\n")
    config = config_of("vqa", run_dir=str(tmp_path / "run"), log={"tensorboard": False, "progress": False})
    environment = config.environment.model_copy(update={"test_files": (str(tmp_path / "test.csv"),)})
    run = build(config.model_copy(update={"environment": environment}), frames={"train": pd.DataFrame(rows)})
    assert [len(source) for source in (run.sources.train, run.sources.dev, run.sources.test)] == [2, 1, 1]
    prompted = run.sources.train.get(1)
    assert prompted is not None
    assert len(prompted.prompt.images) == 1


@pytest.mark.parametrize(
    ("name", "frames", "problem"),
    [
        ("shapes", {"train": [QUESTION]}, r"rows are given, but environment.name=shapes takes none; choose rows"),
        ("vqa", {"validation": [QUESTION]}, "frames: no split is called validation; name them train, dev, test"),
    ],
)
def test_rows_that_nobody_would_read(name: str, frames: Mapping[Split, InMemory], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem), rows_as_files(config_of(name), frames):
        pass


def test_two_columns_of_one_name_are_refused() -> None:
    frame = pd.DataFrame([["<image>Which?", "red", "blue"]], columns=["question", "answer", "answer"])
    problem = "the argument rows has several columns called 'answer', of which one would be read; rename or drop"
    with pytest.raises(DataError, match=problem), rows_as_files(config_of("vqa"), {"train": frame}):
        pass
