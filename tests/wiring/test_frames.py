"""Rows given from Python, and what is said of rows and reward before a run begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.wiring.environment import make_environment
from fovea.wiring.given import rows_as_files
from fovea.wiring.images import make_opener
from fovea.wiring.run import build
from fovea.wiring.trial_score import remarks_on_answers, remarks_on_shares
from fovea_gym.environments.base import Split
from fovea_gym.errors import FoveaError
from fovea_gym.rows.rows import InMemory

QUESTION = {"question": "<image>Which?", "answer": "red"}
PLACE = {"country": "France", "city": "Paris", "lat": 48.86, "lon": 2.35}


def config_of(name: str, **settings: object) -> Config:
    environment = {"name": name, "train_files": [], "test_files": []} if name != "shapes" else {"name": name}
    return Config.model_validate({"model": {"tiny": {}}, "environment": environment, **settings})


@pytest.mark.parametrize(
    ("name", "row"), [("geo3k", QUESTION), ("vqa", QUESTION), ("caption", QUESTION), ("geospot", PLACE)]
)
def test_every_environment_of_rows_takes_them_from_python(name: str, row: Mapping[str, object], tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "b.png")
    rows = pd.DataFrame([{**row, "image": "a.png"}, {**row, "image": "b.png"}])
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


SEVERAL = pd.DataFrame([["<image>Which?", "red", "blue"]], columns=["question", "answer", "answer"])


@pytest.mark.parametrize(
    ("name", "frames", "problem"),
    [
        ("shapes", {"train": [QUESTION]}, r"rows are given, but environment.name=shapes takes none; choose rows"),
        ("vqa", {"validation": [QUESTION]}, "frames: no split is called validation; name them train, dev, test"),
        ("vqa", {"train": SEVERAL}, "rows has several columns called 'answer', of which one would be read; rename or"),
    ],
)
def test_rows_that_cannot_be_read(name: str, frames: Mapping[Split, InMemory], problem: str) -> None:
    with pytest.raises(FoveaError, match=problem), rows_as_files(config_of(name), frames):
        pass


@pytest.mark.parametrize(
    ("row", "settings", "is_said"),
    [
        ({"question": "?", "solution": "4"}, (), True),  # TRL's name
        ({"question": "?", "solution": "4"}, ("environment.answer_key=solution",), False),
        ({"question": "?", "answer": "4"}, (), False),
        ({"question": "?", "answer": {"lat": 1.0}}, (), False),  # for the reward to find in the row
    ],
)
def test_a_reward_whose_rows_have_no_answers_is_told_so(
    row: dict[str, object], settings: tuple[str, ...], is_said: bool, tmp_path: Path
) -> None:
    """`task.answer in text` would be right for every text."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    files = [f"environment.{split}_files=[{tmp_path / 'rows.jsonl'}]" for split in ("train", "test")]
    own = tmp_path / "own.py"
    own.write_text("def right(task, text, images):\n    return float(task.answer in text)\n")
    config = load_config([], ["model.tiny={}", "environment.name=rows", *files, f"reward={own}:right", *settings])
    graded = make_environment(config)
    said = "".join(remarks_on_answers(graded))
    graded.grading.close()
    for part in (
        "is called answer or reward_model, so task.answer is empty in the",
        "the columns are question, solution",
    ):
        assert (part in said) is is_said
    assert bool(said) is is_said


def test_shares_of_a_part_that_became_larger_are_said_with_their_numbers(tmp_path: Path) -> None:
    rows = [{"problem": str(row), "answer": "1", "images": [f"{row % 3}.png"]} for row in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"name": "vqa", "train_files": [str(tmp_path / "rows.jsonl")], "test_share": 0.2, "dev_share": 0.05}
    parts = {"files": {"environment": files}, "scenes": {"environment": {"name": "shapes"}}}
    environment = json.dumps({"name": "mixture", "parts": parts})
    config = load_config([], ["model.tiny={}", f"environment={environment}", "warmup=null"])
    graded = make_environment(config)
    said = list(remarks_on_shares(config, graded))
    graded.grading.close()
    assert [line.partition(", since")[0] for line in said] == [
        "environment.parts.files.environment.test_share=0.2 of 60 rows holds out 20 and leaves 20 to train on",
        "environment.parts.files.environment.dev_share=0.05 of 60 rows holds out 20 and leaves 20 to train on",
    ]
