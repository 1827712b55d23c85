"""Rendered data sets: every gold answer scores full marks, equal seeds give equal files, a scene has one answer."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.config.run import Config
from fovea.loop import train
from fovea.wiring.environment import make_environment
from fovea.wiring.run import build
from fovea_gym.environments.base import Split
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.environments.shapes.scenes import Thing
from fovea_gym.graders.vqa_words import LETTERS
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_tools.data_sets.europe import REGIONS
from fovea_tools.data_sets.readable import KINDS, UNSEEN, is_unseen
from fovea_tools.data_sets.scenes import FORMS, captions
from fovea_tools.data_sets.vqa import NUM_ANNOTATORS, QUESTION_TYPES, ask
from gym_tests.grading import check_gold, scored
from gym_tests.tables import table


class DataSet(NamedTuple):
    recipe: str
    rows: dict[str, int]
    """By file."""
    options: tuple[str, ...] = ()


SMALL = {"train": 200, "validation": 10, "test": 20}
DATA_SETS = {
    "vqa": DataSet("vqa", {"train": 300, "test": 30}),
    "visual-qa": DataSet("vlm_gym_vqa", {"train": 120, "test": 12}),
    "caption": DataSet("caption", {"train": 200, "test": 20}),
    "readable": DataSet("readable", SMALL),
    "geospot-europe": DataSet("geospot_europe", SMALL),
}
OWN_MODEL = ("readable", "geospot-europe")
"""Data sets whose recipe has a tiny model and its warm-up."""


def written(name: str, folder: Path, *options: str) -> Path:
    made = DATA_SETS[name]
    words = ["data", name, "--out", str(folder), "--rows", str(made.rows["train"]), *made.options, *options]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(folder / f"{file}.parquet") for file in made.rows]
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: written(name, tmp_path_factory.mktemp(name)) for name in DATA_SETS}


def rows_of(folder: Path, file: str = "train") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / f"{file}.parquet").to_pylist()
    return rows


def config_of(name: str, folder: Path, *overrides: str) -> Config:
    # all training rows are trained on
    names = {"train": "train", "dev": "validation" if name in OWN_MODEL else "test", "test": "test"}
    files = [f"environment.{split}_files=[{folder / f'{file}.parquet'}]" for split, file in names.items()]
    recipes = [DATA_SETS[name].recipe, *([] if name in OWN_MODEL else ["tiny"])]
    return load_config(list(map(shipped_recipe, recipes)), [*files, *overrides])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vqa", []),
        ("vqa", ["environment.answers_key=answers"]),
        ("visual-qa", []),
        ("caption", []),
        ("caption", ["environment.metric_weights={cider: 1, chrf: 1, bleu: 1}"]),
        ("readable", []),
        ("geospot-europe", []),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_answers_of_every_row_score_full_marks(
    name: str, overrides: list[str], split: Split, folders: dict[str, Path]
) -> None:
    made = make_environment(config_of(name, folders[name], *overrides))
    assert len(made.environment.tasks(split)) == DATA_SETS[name].rows[split]
    check_gold(made.environment, made.grading.graders, split)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vqa", "caption"])
def test_gold_answers_of_a_set_as_large_as_by_default_score_full_marks(name: str, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["data", name, "--out", str(tmp_path)]).exit_code == 0
    made = make_environment(config_of(name, tmp_path))
    splits: dict[Split, int] = {"train": 5000, "test": 500}
    for split, size in splits.items():
        assert len(made.environment.tasks(split)) == size
        check_gold(made.environment, made.grading.graders, split)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_gold_answers_of_every_drawn_row_score_full_marks(split: Split) -> None:
    """The rows of recipes/shapes.yaml, which no file holds."""
    check_gold(Shapes(ShapesEnvironment(), 0), Shapes.graders, split)


def pictures(name: str, folder: Path, file: str) -> list[bytes]:
    rows = rows_of(folder, file)
    assert len(rows) == DATA_SETS[name].rows[file]
    images = [image for row in rows for image in row.get("images") or [row.get("image")] if image is not None]
    return [image["bytes"] for image in images]


@pytest.mark.parametrize("name", DATA_SETS)
def test_equal_seeds_give_equal_files_and_no_picture_is_in_two(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    again, other = written(name, tmp_path / "again"), written(name, tmp_path / "other", "--seed", "1")
    found = {file: pictures(name, folders[name], file) for file in DATA_SETS[name].rows}
    for file, own in found.items():
        assert (again / f"{file}.parquet").read_bytes() == (folders[name] / f"{file}.parquet").read_bytes()
        assert not set(own) & set(pictures(name, other, file))
    assert len(set().union(*found.values())) == sum(map(len, found.values()))
    assert not list(again.glob(".*")), "a partial file was left"


def test_types_take_turns_and_answers_are_balanced(folders: dict[str, Path]) -> None:
    rows = rows_of(folders["vqa"])
    assert Counter(row["question_type"] for row in rows) == dict.fromkeys(QUESTION_TYPES, 60)
    answers = Counter((row["question_type"], row["answer"]) for row in rows)
    assert [answers["counting", str(count)] for count in range(6)] == [10] * 6
    assert [answers["multiple_choice", letter] for letter in "ABCD"] == [15] * 4
    for kind in ("existence", "yes_no"):
        assert [answers[kind, answer] for answer in ("yes", "no")] == [30, 30]


def test_some_rows_have_ten_annotators(folders: dict[str, Path]) -> None:
    rows = rows_of(folders["vqa"])
    several = [row for row in rows if row["answers"] is not None]
    assert {row["question_type"] for row in several} == {"counting", "attribute"}
    assert 30 < len(several) < 90
    assert {len(row["answers"]) for row in several} == {NUM_ANNOTATORS}
    assert Counter(row["answers"].count(row["answer"]) for row in several).keys() == {7, 8, 9, 10}
    keys = ("environment.answers_key=answers", "environment.kind_key=null")
    made = make_environment(config_of("vqa", folders["vqa"], *keys))
    dissent = next(
        (task, said)
        for task in made.environment.tasks("train")
        for said in task.row["answers"] or ()  # type: ignore[attr-defined]
        if said != task.answer
    )
    assert 0 < scored(made.grading.graders, *dissent).reward < 1


def fits(words: list[str], thing: Thing) -> bool:
    return all(word in ("thing", thing.shape, thing.colour) for word in words)


def answers_by_looking(question: str, things: tuple[Thing, ...]) -> set[str]:
    """All answers that the things allow; one for a question that is not ambiguous."""
    first, *options = question.split("\n")
    words = first.rstrip("?").replace("circles", "circle").replace("squares", "square").split()
    words = [word.removesuffix("s") if word in ("triangles", "things") else word for word in words]
    if first.startswith("How many"):
        return {str(sum(fits(words[2:-2], thing) for thing in things))}
    if first.startswith("Is there"):
        return {"yes" if any(fits(words[3:], thing) for thing in things) else "no"}
    if first.startswith("Are there more"):
        one, other = (sum(fits([word], thing) for thing in things) for word in (words[3], words[5]))
        return {"yes" if one > other else "no"}
    if first.startswith("Are all"):
        return {"yes" if all(fits(words[4:], thing) for thing in things) else "no"}
    if first.startswith("What shape"):
        return {thing.shape for thing in things if fits(words[4:], thing)}
    colours = {thing.colour for thing in things if fits(words[4:], thing)}
    if not options:
        return set(colours)
    named = {option[3:]: option[0] for option in options[:-1]}
    if first.startswith("What colour"):
        return {named[colour] for colour in colours}
    return {named[name] for name in (f"a {thing.colour} {thing.shape}" for thing in things) if name in named}


@table("kind", QUESTION_TYPES)
def test_questions_have_one_answer(kind: str) -> None:
    rng = np.random.default_rng(0)
    for turn in range(600):
        scene = ask(kind, turn, rng)  # type: ignore[arg-type]
        assert answers_by_looking(scene.question, scene.things) == {scene.answer}, scene
        assert 1 <= len(scene.things) <= 9, "a grid has nine places"
        if kind == "multiple_choice":
            assert scene.answer in LETTERS[:4]
            assert len(set(scene.question.split("\n")[1:-1])) == 4


def test_captions_say_what_is_seen() -> None:
    red, blue = Thing(shape="circle", colour="red"), Thing(shape="square", colour="blue")
    said = captions([blue, red, blue], len(FORMS), np.random.default_rng(0))
    assert said[0] == "The image shows a red circle and two blue squares."
    assert said[1] in ("There is a red circle and two blue squares.", "There are two blue squares and a red circle.")
    assert all(all(name in caption for name in ("a red circle", "two blue squares")) for caption in said)


def test_rows_have_one_to_five_captions_and_all_count(folders: dict[str, Path]) -> None:
    rows = rows_of(folders["caption"])
    assert Counter(len(row["answer"]) for row in rows) == dict.fromkeys(range(1, 6), 40)
    made = make_environment(config_of("caption", folders["caption"]))
    task = made.environment.tasks("train")[4]
    for caption in rows[4]["answer"]:
        assert scored(made.grading.graders, task, caption).parts["chrf"] == 1.0


def test_numbers_of_a_diagram_are_only_in_the_picture(folders: dict[str, Path]) -> None:
    rows = rows_of(folders["readable"])
    assert {row["kind"] for row in rows} == set(KINDS)
    assert len({row["problem"] for row in rows}) == len(KINDS)
    assert not any(character.isdigit() for row in rows for character in row["problem"])


def test_unseen_problems_are_in_the_test_file_only(folders: dict[str, Path]) -> None:
    kinds = {split: [row["kind"] for row in rows_of(folders["readable"], split)] for split in SMALL}
    assert {kind.removesuffix(UNSEEN) for kind in kinds["test"] if kind.endswith(UNSEEN)} == set(KINDS)
    assert not any(kind.endswith(UNSEEN) for split in ("train", "validation") for kind in kinds[split])


@table("kind", KINDS)
def test_digits_of_unseen_problems_and_their_sums_are_in_seen_ones(kind: str) -> None:
    """An unseen problem can be answered digit by digit: tens by tens and ones by ones, since nothing carries."""
    seen = [numbers for numbers in KINDS[kind].problems if not is_unseen(numbers)]
    unseen = [numbers for numbers in KINDS[kind].problems if is_unseen(numbers)]
    assert 0.15 < len(unseen) / len(KINDS[kind].problems) < 0.25
    for place in (1, 10):
        digits = {(tuple(n // place % 10 for n in each), KINDS[kind].answer(*each) // place % 10) for each in seen}
        # the digits at a place decide the answer's digit at that place
        assert len({asked for asked, _ in digits}) == len(digits)
        assert {tuple(n // place % 10 for n in each) for each in unseen} <= {asked for asked, _ in digits}


def test_cities_are_of_26_countries_with_all_parts(folders: dict[str, Path]) -> None:
    rows = rows_of(folders["geospot-europe"])
    places = {(row["city"], row["region"], row["country"], row["lat"], row["lon"]) for row in rows}
    assert len(places) == len({place[2] for place in places}) == len(REGIONS) == 26
    assert None not in {part for place in places for part in place}


def test_places_held_out_are_in_no_other_file_and_nobody_asks_for_their_names(tmp_path: Path) -> None:
    written("geospot-europe", tmp_path, "--hold-out-places")
    rows = {split: rows_of(tmp_path, split) for split in SMALL}
    places = {split: {(row["lat"], row["lon"]) for row in rows[split]} for split in SMALL}
    assert not places["test"] & (places["train"] | places["validation"])
    assert {row["country"] for row in rows["test"]} <= {row["country"] for row in rows["train"]}
    assert {(row["city"], row["region"]) for split in SMALL for row in rows[split]} == {(None, None)}


@pytest.mark.parametrize(("degrees", "least", "most"), [(0, 0, 3), (3, 4, 10)])
def test_the_map_moves_below_the_mark(degrees: int, least: int, most: int, tmp_path: Path) -> None:
    """Widest spread of the marks of one city, in pixels of .9 degrees; a mark moves by a pixel itself."""
    written("geospot-europe", tmp_path, "--move-degrees", str(degrees))
    rows = rows_of(tmp_path)
    marks: dict[str, list[int]] = {}
    for row in rows:
        map_YXC = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])), dtype=int)
        distance_YX = np.abs(map_YXC - (214, 24, 40)).sum(axis=2)  # from the mark's colour
        marks.setdefault(row["city"], []).append(int(distance_YX.argmin() % 64))
    assert least < max(max(places) - min(places) for places in marks.values()) < most


@pytest.mark.parametrize("name", DATA_SETS)
def test_recipe_and_tiny_model_take_two_steps(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    small = ["max_steps=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4"]
    small += ["warmup.max_steps=2" if name in OWN_MODEL else "warmup=null", f"run_dir={tmp_path}"]
    small += ["evaluate.test_size=10", "evaluate.dev_size=10", "log.tensorboard=false", "log.progress=false"]
    summary = train(build(config_of(name, folders[name], *small)))
    assert (summary.steps, summary.final.num_rows) == (2, 10)


def test_files_where_a_recipe_looks_for_them_need_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("vqa", "visual-qa", "caption"):
        result = CliRunner().invoke(app, ["data", name, "--rows", "10"])
        recipe = DATA_SETS[name].recipe
        assert f"train on them: fovea train {recipe}\n" in result.stderr
        settings = load_config([shipped_recipe(recipe)], []).environment
        assert [Path(file) for file in (*settings.train_files, *settings.test_files)] == [  # type: ignore[union-attr]
            Path(line) for line in result.stdout.split()
        ]
    elsewhere = CliRunner().invoke(app, ["data", "vqa", "--rows", "10", "--out", "mine"])
    assert "fovea train vqa 'environment.train_files=[mine/train.parquet]'" in elsewhere.stderr


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "train.parquet").touch()
    result = CliRunner().invoke(app, ["data", "vqa", "--rows", "4", "--out", str(file)])
    assert result.exit_code == 2
    assert "Invalid value for '--out': " in result.stderr
    assert f"'{file}' is a file." in result.stderr
