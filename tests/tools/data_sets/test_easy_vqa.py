"""easy-VQA's files: equal for equal seeds, no picture in two splits, and answers that agree with the pictures."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea_gym.environments.base import Split
from gym_tests.grading import scored

pytest.importorskip("easy_vqa", reason="the package easy-vqa is not installed (the extra talk)")

from fovea.utils.installing import pip_install
from fovea_tools.data_sets.easy_vqa import EasyVqaPicture, question_type, split_pictures

ROOT = Path(__file__).parents[3]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
SIZES = {"train": 600, "dev": 60, "test": 60}


def written(folder: Path, *options: str) -> dict[Split, Path]:
    result = CliRunner().invoke(app, ["data", "easy-vqa", "--out", str(folder), "--rows", "600", *options])
    assert result.exit_code == 0, result.output
    files = {split: folder / f"{split}.parquet" for split in SPLITS}
    assert result.stdout.split() == [str(file) for file in files.values()]
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Split, Path]:
    return written(tmp_path_factory.mktemp("easy_vqa"))


@pytest.fixture(scope="module")
def pictures() -> dict[Split, list[EasyVqaPicture]]:
    return {split: list(found) for split, found in split_pictures(seed=0).items()}


def pixels(cell: bytes) -> bytes:
    with Image.open(io.BytesIO(cell)) as image:
        assert image.size == (64, 64)
        return image.convert("RGB").tobytes()


def test_equal_seeds_give_equal_files(files: dict[Split, Path], tmp_path: Path) -> None:
    again, other = written(tmp_path / "again"), written(tmp_path / "other", "--seed", "1")
    assert {split: pq.read_metadata(file).num_rows for split, file in files.items()} == SIZES
    for split in SPLITS:
        assert again[split].read_bytes() == files[split].read_bytes()
        assert other[split].read_bytes() != files[split].read_bytes()


def test_no_picture_is_in_two_splits(pictures: dict[Split, list[EasyVqaPicture]]) -> None:
    seen = [pixels(picture.file.read_bytes()) for found in pictures.values() for picture in found]
    assert len(set(seen)) == len(seen) == 5000, "pictures of the package that are equal, pixel for pixel"
    assert {split: len(found) for split, found in pictures.items()} == {"train": 3600, "dev": 400, "test": 1000}


def test_rows_are_about_the_pictures_of_their_split(
    files: dict[Split, Path], pictures: dict[Split, list[EasyVqaPicture]]
) -> None:
    for split, file in files.items():
        encoded = {picture.id: picture.file.read_bytes() for picture in pictures[split]}
        for row in pq.read_table(file).to_pylist():
            assert row["images"][0]["bytes"] == encoded[row["image_id"]]


def test_answers_agree_with_what_the_pictures_are_said_to_show(pictures: dict[Split, list[EasyVqaPicture]]) -> None:
    """The package's own answers are the reference for contents and question types, which are read from words."""
    checked = 0
    for picture in (each for found in pictures.values() for each in found):
        if picture.contents is None:
            continue
        for question in picture.questions:
            kind = question_type(question)
            shown = any(word in question.text for word in picture.contents)
            expected = {
                "colour": picture.contents[0],
                "shape": picture.contents[1],
                "presence": "yes" if shown else "no",
                "absence": "no" if shown else "yes",
            }
            assert question.answer == expected[kind], (picture.id, question)
            checked += 1
    assert checked > 30_000


def test_every_true_answer_scores_full_marks(files: dict[Split, Path]) -> None:
    settings = [f"environment.{split}_files=[{file}]" for split, file in files.items()]
    made = make_environment(load_config([ROOT / "recipes" / "easy_vqa.yaml"], settings))
    for split in SPLITS:
        tasks = made.environment.tasks(split)
        assert {task.kind for task in tasks} == {"colour", "shape", "presence", "absence"}
        for task in tasks:
            answer = f"{task.answer.capitalize()}."
            score = scored(made.grading.graders, task, answer, tuple(made.environment.prompt(task)))
            assert (score.reward, score.accuracy) == (1.0, 1.0), (task.id, answer)


def test_without_the_package_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['easy_vqa'] = None; sys.argv = ['fovea', 'data', 'easy-vqa'];"
        "from fovea.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert pip_install("talk") in done.stderr
