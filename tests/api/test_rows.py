"""Rows in every form train from Python, and are read again from the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import datasets
import numpy as np
import pandas as pd
import psutil
import pyarrow.parquet as pq
import pytest

import fovea
from fovea.metrics.log import read_metrics
from fovea.wiring.environment import make_environment
from fovea.wiring.given import rows_as_files
from fovea.wiring.images import make_opener
from fovea_gym.settings.environments import VqaEnvironment
from gym_tests.images import png
from gym_tests.tables import table
from tests.api.small import PHOTOS, SETTINGS, base64_png, of_rows, picture, rows, score

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def as_paths(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    Path("photos").mkdir()
    for index, row in enumerate(given):
        row["photo"].save(f"photos/{index}.png")
    return [{**row, "photo": Path(f"photos/{index}.png")} for index, row in enumerate(given)]


FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "DataFrame": pd.DataFrame,
    "Dataset": datasets.Dataset.from_list,
    "list": list,
    "columns": lambda given: {key: [row[key] for row in given] for key in given[0]},
    "paths": as_paths,
    "bytes": lambda given: [{**row, "photo": png(row["answer"], 32)} for row in given],
    "base64": lambda given: pd.DataFrame([{**row, "photo": base64_png(row["answer"])} for row in given]),
    "arrays": lambda given: [{**row, "photo": np.asarray(row["photo"])} for row in given],
    "lists of images": lambda given: [{**row, "photo": [row["photo"]]} for row in given],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_rows_gives_the_same_tasks(form: str) -> None:
    with rows_as_files(of_rows().config, {"train": FORMS[form](rows())}) as written:
        written.move_into(Path("run"))
    open_image = make_opener(written.config.data, Path("run"))
    tasks = make_environment(written.config, rewards=[score]).environment.tasks("train")
    assert len(tasks) == 6
    assert {open_image(task.images[0]).tobytes() == picture(task.answer).tobytes() for task in tasks} == {True}
    assert {len(task.images) for task in tasks} == {1}


@pytest.mark.parametrize("form", ["DataFrame", "Dataset", "paths"])
def test_rows_train(form: str) -> None:
    run = of_rows(FORMS[form](rows())).train()
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert all(row["reward/shown"] == 1 for row in run.metrics), "the reward sees the picture of the row"
    (file,) = (run.folder / "rows").iterdir()
    assert pq.read_table(file).num_rows == 8
    assert run.summary is not None
    assert run.summary["test"]["final"].accuracy.n == 1, "a tenth of the rows is held out"


def test_equal_rows_in_memory_resume_and_other_rows_are_refused() -> None:
    first = of_rows().train()
    assert len(of_rows(max_steps=3, resume="auto").train().metrics) == 3
    changed = rows()
    changed[5]["photo"] = picture("black")
    with pytest.raises(fovea.FoveaError, match=r"\brows\b.*\brun in run\b"):
        of_rows(changed, max_steps=4, resume="auto").train()
    # its own rows need not be given again
    assert len(fovea.GRPO(recipe=first.config_file, reward=score, resume="auto", max_steps=4).train().metrics) == 4


@pytest.mark.slow
def test_a_run_folder_that_was_moved_evaluates_on_its_own_rows() -> None:
    run = of_rows().train()
    moved = run.folder.rename("elsewhere")
    (metrics,) = fovea.evaluate(moved, reward=score, quiet=True)
    assert metrics.accuracy.n == 1


def test_rows_without_an_answer_and_with_nested_cells_reach_the_reward_as_they_are() -> None:
    seen: list[Any] = []

    def look(task: fovea.Task, text: str, images: Any) -> float:
        seen.append((task.answer, dict(task.row)))
        return 1.0

    given = [{"image": row["photo"], "prompt": "Where?", "boxes": [[1, 2], [3, 4]]} for row in rows()]
    fovea.GRPO(rows=given, reward=look, settings=SETTINGS, run_dir="run").train()
    assert {answer for answer, _ in seen} == {""}
    assert all(row["boxes"][1] == [3, 4] for _, row in seen)


@pytest.mark.slow
def test_rows_may_have_a_grader_of_fovea() -> None:
    given = {"rows": rows(), "test_rows": rows(3), "environment": {"name": "vqa", **PHOTOS}}
    run = fovea.GRPO(**given, settings=SETTINGS, run_dir="run").train()
    assert {row["reward/answer"] for row in read_metrics(run.folder)} <= {0.0}
    assert run.summary is not None
    assert run.summary["test"]["final"].accuracy.n == 2, "evaluate.test_size"


RED = {"photo": png("red", 32), "question": "?"}


@table(
    ("given", "message"),
    [
        ([], r"rows holds no rows; give at least one"),
        (3, r"rows: an object of type int holds no rows that can be read; give a pandas DataFrame"),
        (Path("data.csv"), r"environment\.train_files: no such file data\.csv"),
        ([RED, 3], r"rows row 1 is of type int"),
        (
            [{"picture": RED["photo"], "question": "?"}],
            r"environment\.image_key: the argument rows has no column 'photo'",
        ),
        ([{"photo": RED["photo"], "text": "?"}] * 4, r"^rows: no column is called .*; set environment\.prompt_key"),
        ([RED, {**RED, "photo": 3.5}], r"\brows row 1, image 1: .*\bfloat\b"),
        ([{**RED, "photo": np.zeros((4, 4, 3))}], r"\brows row 0, image 1: .*\bfloat64\b.*\buint8\b"),
        ([{**RED, "extra": extra} for extra in (1, object())], r"\brows row 1, column extra: .*\bobject\b"),
        ([{**RED, "extra": {}}], r"\brows, column extra: a mapping\b"),
        ([{**RED, "extra": [{"kind": "a", "more": {}}]}], r"\brows, column extra: a mapping\b"),
        ([{**RED, "second": picture("red")}], r"\brows row 0, column second: .*\benvironment\.image_key=second\b"),
        (
            [{**RED, "answer": answer} for answer in (3, "three")],
            r"\brows, column answer\b.*\bint \(row 0\), str \(row 1",
        ),
    ],
)
def test_what_broken_rows_are_told(given: object, message: str) -> None:
    with pytest.raises(fovea.FoveaError, match=message):
        of_rows(given).train()
    assert not Path("run").exists(), "a folder was made for a run that never began"


@table(
    ("names", "environment", "message"),
    [
        ({"question": "questoin"}, PHOTOS, r"^rows: no column is called .*; set environment\.prompt_key=questoin$"),
        (
            {},
            {**PHOTOS, "prompt_key": "questoin"},
            r"^environment\.prompt_key: .*; set environment\.prompt_key=question$",
        ),
        ({}, {**PHOTOS, "answer_key": "anwser"}, r"no column 'anwser'.*set environment\.answer_key=answer"),
        ({"photo": "photos"}, PHOTOS, r"rows has no column 'photo'.*set environment\.image_key=photos"),
        ({}, {**PHOTOS, "kind_key": "kind"}, r"no column 'kind'.*set environment\.kind_key to one of them"),
        # no column of pictures is offered as that of questions
        ({"photo": "image", "question": None}, None, r" columns are image, answer; set environment.prompt_key to one"),
        ({}, None, r"rows: no column is called images or image, so the images were not found; the"),
    ],
)
def test_a_column_that_is_not_there_is_told_with_the_nearest_one(
    names: dict[str, str | None], environment: dict[str, str] | None, message: str
) -> None:
    given = [{name: cell for key, cell in row.items() if (name := names.get(key, key)) is not None} for row in rows()]
    with pytest.raises(fovea.FoveaError, match=message):
        fovea.GRPO(rows=given, reward=score, environment=environment, settings=SETTINGS, run_dir="run").train()


@pytest.mark.parametrize("argument", ["rows", "test_rows", "dev_rows"])
def test_what_is_no_table_is_refused_where_it_is_given(argument: str) -> None:
    given = {"rows": rows(), argument: pd.Series(["a question"])}
    with pytest.raises(fovea.FoveaError, match=rf"^{argument}: .*\bSeries\b"):
        fovea.GRPO(**given, reward=score, environment=PHOTOS, settings=SETTINGS)


def test_the_rows_that_lack_a_column_are_named() -> None:
    misspelt = [{"photo": row["photo"], "questoin": "?"} for row in rows(3)]
    with pytest.raises(fovea.FoveaError, match=r"^test_rows: .*\bproblem, prompt, question\b"):
        fovea.GRPO(rows=rows(), test_rows=misspelt, reward=score, environment=PHOTOS, settings=SETTINGS).train()


def test_rows_without_a_column_for_answers_say_so() -> None:
    """A reward of one's own may do without; an environment that grades may not, nor a warm-up, which imitates them."""
    given = [{"photo": row["photo"], "question": row["question"], "anwser": row["answer"]} for row in rows()]
    nearest = r"rows: no column is called answer or reward_model, .*=anwser"
    graded = {"environment": {"name": "vqa", **PHOTOS}}
    warmed = {"reward": score, "environment": PHOTOS, "warmup": {"max_steps": 1}}
    for settings in (graded, warmed):
        with pytest.raises(fovea.FoveaError, match=nearest):
            fovea.GRPO(rows=given, settings=SETTINGS, run_dir="run", **settings).train()
    assert not Path("run").exists()


def test_rows_take_the_place_of_the_files_of_a_recipe_but_not_of_those_that_are_set_beside_them() -> None:
    files = {name: [f"{name}.jsonl"] for name in ("train_files", "dev_files", "test_files")}
    Path("recipe.yaml").write_text(json.dumps({"model": {"tiny": {}}, "environment": {"name": "vqa", **files}}))

    def splits(**beside: object) -> tuple[object, ...]:
        environment = fovea.GRPO(recipe="recipe.yaml", rows=rows(), environment=beside).config.environment
        assert isinstance(environment, VqaEnvironment)
        assert environment.train_files == ()
        return environment.dev_files, environment.test_files, environment.test_share

    assert splits() == (None, None, 0.1)
    assert splits(dev_files=["own.jsonl"]) == (("own.jsonl",), None, 0.1)
    assert splits(test_files=["own.jsonl"]) == (None, ("own.jsonl",), 0.0)
    assert splits(test_share=0.3) == splits(test_files=None, test_share=0.3) == (None, None, 0.3)


def long(task: fovea.Task, text: str, images: Any) -> float:
    return float(len(text))


@pytest.mark.parametrize("form", ["DataFrame", "list"])
def test_rows_without_a_picture_are_counted_and_said(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    """They train, since a data set may hold questions of words only; one whose pictures went missing is not a such."""
    given = rows()
    given[2]["photo"] = given[5]["photo"] = None
    table = FORMS[form](given)
    fovea.GRPO(rows=table, reward=long, environment=PHOTOS, settings=SETTINGS, run_dir="run").train()
    said = "rows: 2 of 8 rows have no picture in photo (rows 2, 5), and are asked without one; remove them if"
    assert said in "".join(capfd.readouterr())
    fovea.evaluate("gold", rows=table, reward=long, environment=PHOTOS, settings={"data.cache_dir": "cache"})
    assert said in " ".join("".join(capfd.readouterr()).split())


def test_rows_with_a_picture_in_one_of_their_columns_are_told_nothing_of() -> None:
    columns = {"image_keys": ["photo", "second"]}
    config = fovea.GRPO(rows=rows(), reward=score, environment=columns, settings=SETTINGS).config
    pair = [{**row, "photo": [], "second": row["photo"]} for row in rows()]
    with rows_as_files(config, {"train": pair}) as written:
        assert written.remarks == []
    pair[3]["second"] = None
    with rows_as_files(config, {"train": pair, "test": pair}) as written:
        rest = "of 8 rows have no picture in photo, second (row 3), and are asked without one"
        assert [each.partition(";")[0] for each in written.remarks] == [f"rows: 1 {rest}", f"test_rows: 1 {rest}"]


def test_a_row_that_holds_no_image_may_be_skipped_and_is_counted() -> None:
    given = [*rows(), {"photo": 3, "question": "?", "answer": "red"}]
    run = of_rows(given, **{"data.on_bad_row": "skip", "max_epochs": 1, "max_steps": 9}).train()
    assert (run.folder / "bad_rows.jsonl").read_text().count("image_kind") == 1


def itself() -> list[object]:
    held: list[object] = []
    held.extend([held, held])
    return held


def nested(levels: int) -> object:
    inner: object = 0
    for _ in range(levels):
        inner = [inner]
    return inner


def put(cell: Callable[[], object]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Add a column of such cells."""
    return lambda frame: frame.assign(x=[cell() for _ in range(len(frame))])


@table(
    ("change", "message"),
    [
        (lambda frame: frame.drop(columns="question"), r"rows: no column is called .* set environment\.prompt"),
        (lambda frame: frame.iloc[:0], "rows holds no rows; give at least one"),
        (lambda frame: pd.DataFrame(), "rows holds no rows; give at least one"),
        (lambda frame: pd.concat([frame, frame[["answer"]]], axis=1), "several columns called"),
        (lambda frame: pd.concat({"a": frame}, axis=1), r"its columns have 2 levels, .*; join them first"),
        (lambda frame: [*frame.to_dict("records")[:1], {"\ud800": 1}], r"name of column .*; rename it"),
        (put(Lock), r"row 0, column x: .* type lock"),
        (put(lambda: 1j), r"row 0, column x: a value of type complex .*; make it text"),
        (put(lambda: pd.Period("2020")), r"row 0, column x: a value of type Period"),
        (lambda frame: frame.assign(x=[1, "a"] * (len(frame) // 2)), r"column x holds int .*; make all"),
        (
            lambda frame: frame.assign(x=[[1], ["a"]] * (len(frame) // 2)),
            r"column x has cells of no common type .*; make",
        ),
        (put(itself), r"row 0, column x: .* contains itself"),
        (put(lambda: nested(3000)), r"row 0, column x: .* 32 deep"),
    ],
)
def test_a_fault_of_a_frame_is_one_line_with_its_fix(change: Callable[[pd.DataFrame], Any], message: str) -> None:
    frame = pd.DataFrame(rows())
    with (
        pytest.raises(fovea.FoveaError, match=message) as error,
        rows_as_files(of_rows(frame).config, {"train": change(frame)}),
    ):
        pass
    assert "\n" not in str(error.value)


def test_what_is_nested_less_deeply_is_kept() -> None:
    frame = put(lambda: nested(20))(pd.DataFrame(rows()))
    with rows_as_files(of_rows(frame).config, {"train": frame}) as written:
        (file,) = written.files.values()
        assert pq.read_table(file)["x"][0].as_py() == nested(20)


@table(
    ("arguments", "message"),
    [
        ({"train": pd.DataFrame(rows())}, "train is a DataFrame, which no setting accepts; give its rows as rows="),
        ({"settings": {"train": pd.DataFrame(rows())}}, "train is a DataFrame"),
        ({"environment": {"name": "geo3k", "train_files": pd.DataFrame(rows())}}, "environment.train_files is a DataF"),
        ({"reward": pd.DataFrame(rows())}, "reward="),
        ({"tools": pd.DataFrame(rows())}, "tools="),
        ({"settings": pd.DataFrame(rows())}, "settings="),
    ],
)
def test_a_frame_at_another_place_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fovea.FoveaError) as error:
        fovea.GRPO(**{"model": {"tiny": {}}, "environment": "geo3k", **arguments})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_large_pictures_are_written_few_at_a_time_and_their_memory_is_given_back() -> None:
    frame = pd.DataFrame({"image": [os.urandom(4 * 2**20) for _ in range(30)], "prompt": "?"})
    config = fovea.GRPO(rows=frame[:1], reward=score, environment="rows", settings=SETTINGS, run_dir="run").config
    process = psutil.Process()
    before = process.memory_info().rss
    with rows_as_files(config, {"train": frame}) as written:
        (file,) = written.files.values()
        assert process.memory_info().rss - before < 60 * 2**20
        with pq.ParquetFile(file) as table:
            assert [table.metadata.row_group(group).num_rows for group in range(4)] == [8, 8, 8, 6]
