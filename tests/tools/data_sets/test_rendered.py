"""Rendered data sets: every gold answer scores full marks, equal seeds give equal files, a scene has one answer."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.environments import ShapesEnvironment
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.data.images import ImageOpener
from fovea.data.order import kinds_of
from fovea.environments.base import Environment, Split
from fovea.environments.graders.base import Grader
from fovea.environments.graders.vqa_words import LETTERS
from fovea.environments.shapes.environment import Shapes
from fovea.environments.shapes.scenes import Thing
from fovea.loop import train
from fovea.tools.data_sets.scenes import FORMS, captions
from fovea.tools.data_sets.vqa import NUM_ANNOTATORS, QUESTION_TYPES, ask
from fovea.wiring.environment import make_environment
from fovea.wiring.run import build
from tests.grading import scored

ROOT = Path(__file__).parents[3]
NUM_ROWS = {"vqa": 300, "visual-qa": 120, "caption": 200, "shapes": 120}
SHAPES_OPTIONS = ("--level", "1", "--level", "3", "--comparison-share", "0.2", "--text-share", "0.2")
SPLITS: tuple[Split, ...] = ("train", "test")
RECIPES = {"visual-qa": "vlm_gym_vqa"}
"""The recipe of a data set whose name is another."""


def written(name: str, folder: Path, *options: str) -> Path:
    more = SHAPES_OPTIONS if name == "shapes" else ()
    words = ["data", name, "--out", str(folder), "--rows", str(NUM_ROWS[name]), *more, *options]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(folder / "train.parquet"), str(folder / "test.parquet")]
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: written(name, tmp_path_factory.mktemp(name)) for name in NUM_ROWS}


def config_of(recipe: str, folder: Path, *overrides: str) -> Config:
    files = [f"environment.{split}_files=[{folder / f'{split}.parquet'}]" for split in SPLITS]
    files += [f"environment.dev_files=[{folder / 'test.parquet'}]"]  # all training rows are trained on
    recipes = [ROOT / "recipes" / f"{RECIPES.get(recipe, recipe)}.yaml", ROOT / "recipes" / "tiny.yaml"]
    return load_config(recipes, [*files, *overrides])


def check_gold(environment: Environment, graders: Sequence[Grader], split: Split) -> None:
    for task in environment.tasks(split):
        text = environment.target(task)
        score = scored(graders, task, text, tuple(environment.prompt(task)))
        assert (score.reward, score.accuracy) == (1.0, 1.0), (task.id, text)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vqa", []),
        ("vqa", ["environment.answers_key=answers"]),
        ("visual-qa", []),
        ("caption", []),
        ("caption", ["environment.metric_weights={cider: 1, chrf: 1, bleu: 1}"]),
    ],
)
@pytest.mark.parametrize("split", SPLITS)
def test_gold_answers_of_every_row_score_full_marks(
    name: str, overrides: list[str], split: Split, folders: dict[str, Path]
) -> None:
    made = make_environment(config_of(name, folders[name], *overrides))
    environment = made.environment
    assert len(environment.tasks(split)) == NUM_ROWS[name] // (1 if split == "train" else 10)
    check_gold(environment, made.grading.graders, split)


@pytest.mark.parametrize("split", SPLITS)
def test_gold_answers_of_written_shapes_score_full_marks(split: Split, folders: dict[str, Path]) -> None:
    """By another environment, as elsewhere: its `prompt` and `answer` are a public layout."""
    made = make_environment(config_of("vqa", folders["shapes"], "environment.kind_key=kind"))
    environment = made.environment
    assert set(kinds_of(environment.tasks("train"))) == {
        *("counting", "colour", "shape", "existence"),
        *("comparison", "text"),
    }
    check_gold(environment, made.grading.graders, split)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vqa", "caption"])
def test_gold_answers_of_a_set_as_large_as_by_default_score_full_marks(name: str, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["data", name, "--out", str(tmp_path)]).exit_code == 0
    made = make_environment(config_of(name, tmp_path))
    environment = made.environment
    assert [len(environment.tasks(split)) for split in SPLITS] == [5000, 500]
    for split in SPLITS:
        check_gold(environment, made.grading.graders, split)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_gold_answers_of_every_drawn_row_score_full_marks(split: Split) -> None:
    """The rows of recipes/shapes.yaml, which no file holds."""
    check_gold(Shapes(ShapesEnvironment(), 0), Shapes.graders, split)


def test_written_shapes_are_the_rows_of_a_run(folders: dict[str, Path]) -> None:
    settings = ShapesEnvironment(level=(1, 3), comparison_share=0.2, text_share=0.2)
    tasks = Shapes(settings, 0).tasks("train")
    rows = pq.read_table(folders["shapes"] / "train.parquet").to_pylist()
    assert {row["level"] for row in rows} == {1, 3}
    assert {len(row["images"]) for row in rows} == {0, 1, 2}
    reread = make_environment(config_of("vqa", folders["shapes"], "environment.kind_key=kind")).environment.tasks(
        "train"
    )
    for task, row, again in zip(tasks[: len(rows)], rows, reread, strict=True):
        assert (row["prompt"].replace("<image>", ""), row["answer"], row["kind"]) == (
            *(task.question, task.answer),
            task.kind,
        )
        for ref, cell in zip(task.images, again.images, strict=True):
            np.testing.assert_array_equal(ref.source, np.asarray(ImageOpener(max_mib=1, max_megapixels=1)(cell)))


def digests(file: Path) -> list[str]:
    rows = pq.read_table(file).to_pylist()
    images = [image for row in rows for image in row.get("images") or [row.get("image")] if image is not None]
    return [hashlib.sha256(image["bytes"]).hexdigest() for image in images]


@pytest.mark.parametrize("name", NUM_ROWS)
def test_equal_seeds_give_equal_files_and_no_image_is_in_both(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    again, other = written(name, tmp_path / "again"), written(name, tmp_path / "other", "--seed", "1")
    for split in SPLITS:
        file = f"{split}.parquet"
        assert (again / file).read_bytes() == (folders[name] / file).read_bytes()
    train_images, test_images = (digests(folders[name] / f"{split}.parquet") for split in SPLITS)
    assert len({*train_images, *test_images}) == len(train_images) + len(test_images)
    assert not set(train_images) & set(digests(other / "train.parquet"))
    assert not list(again.glob(".*")), "a partial file was left"


def test_types_take_turns_and_answers_are_balanced(folders: dict[str, Path]) -> None:
    rows = pq.read_table(folders["vqa"] / "train.parquet").to_pylist()
    assert Counter(row["question_type"] for row in rows) == dict.fromkeys(QUESTION_TYPES, 60)
    answers = Counter((row["question_type"], row["answer"]) for row in rows)
    assert [answers["counting", str(count)] for count in range(6)] == [10] * 6
    assert [answers["multiple_choice", letter] for letter in "ABCD"] == [15] * 4
    for kind in ("existence", "yes_no"):
        assert [answers[kind, answer] for answer in ("yes", "no")] == [30, 30]


def test_some_rows_have_ten_annotators(folders: dict[str, Path]) -> None:
    rows = pq.read_table(folders["vqa"] / "train.parquet").to_pylist()
    several = [row for row in rows if row["answers"] is not None]
    assert {row["question_type"] for row in several} == {"counting", "attribute"}
    assert 30 < len(several) < 90
    assert {len(row["answers"]) for row in several} == {NUM_ANNOTATORS}
    assert Counter(row["answers"].count(row["answer"]) for row in several).keys() == {7, 8, 9, 10}
    made = make_environment(
        config_of("vqa", folders["vqa"], "environment.answers_key=answers", "environment.kind_key=null")
    )
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


@pytest.mark.parametrize("kind", QUESTION_TYPES)
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
    assert said[1] in (
        "There is a red circle and two blue squares.",
        "There are two blue squares and a red circle.",
    )
    assert all(all(name in caption for name in ("a red circle", "two blue squares")) for caption in said)


def test_rows_have_one_to_five_captions_and_all_count(folders: dict[str, Path]) -> None:
    rows = pq.read_table(folders["caption"] / "train.parquet").to_pylist()
    assert Counter(len(row["answer"]) for row in rows) == dict.fromkeys(range(1, 6), 40)
    made = make_environment(config_of("caption", folders["caption"]))
    task = made.environment.tasks("train")[4]
    for caption in rows[4]["answer"]:
        assert scored(made.grading.graders, task, caption).parts["chrf"] == 1.0


@pytest.mark.parametrize("name", ["vqa", "visual-qa", "caption"])
def test_recipe_and_tiny_model_take_two_steps(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    small = ["max_steps=2", "warmup=null", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    small += ["rollout.max_new_tokens=4", "log.tensorboard=false", "log.progress=false", f"run_dir={tmp_path}"]
    summary = train(build(config_of(name, folders[name], *small, "evaluate.test_size=10", "evaluate.dev_size=10")))
    assert (summary.steps, summary.final.num_rows) == (2, 10)


def test_files_where_a_recipe_looks_for_them_need_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("vqa", "visual-qa", "caption"):
        result = CliRunner().invoke(app, ["data", name, "--rows", "10"])
        recipe = RECIPES.get(name, name)
        assert f"train on them: fovea train {recipe}\n" in result.stderr
        settings = load_config([ROOT / "recipes" / f"{recipe}.yaml"], []).environment
        assert [Path(file) for file in (*settings.train_files, *settings.test_files)] == [  # type: ignore[union-attr]
            Path(line) for line in result.stdout.split()
        ]
    elsewhere = CliRunner().invoke(app, ["data", "vqa", "--rows", "10", "--out", "mine"])
    assert "fovea train vqa 'environment.train_files=[mine/train.parquet]'" in elsewhere.stderr


def test_shares_that_are_too_much_are_one_line(tmp_path: Path) -> None:
    words = ["data", "shapes", "--out", str(tmp_path), "--text-share", "0.7", "--comparison-share", "0.7"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.endswith("more than all rows together; lower one of them\n")
