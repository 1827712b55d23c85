"""`fovea saliency`: falls of an answer's log-prob equal those by transformers; maps of a run, and their page."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.commands.targets import ModelTarget, find_checkpoint
from fovea.config.recipes import shipped_recipes
from fovea.report.samples import read_step
from fovea.report.viewed_run import ViewedRun
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import ImageRef
from fovea_tools.saliency.maps import (
    FOLDER,
    MAX_MAPS,
    MAX_PATCHES,
    AnswerMap,
    map_path,
    read_maps,
    sample_place,
    write_map,
)
from fovea_tools.saliency.occluder import Asked, Occluder, Wanted, row_numbers
from fovea_tools.saliency.occlusion import OcclusionMap
from fovea_tools.saliency.page import write_page
from gym_tests.tables import table
from tests.reference import reference_logprobs
from tests.report.pages import ATTACK
from tests.runs import QUICK, fovea_here
from tests.tiny_models import renderer, save, tiny

SIDE = 20
"""Of patches: those at the right and lower edge of 48 px are cut."""
ANSWER = "It is red."


@pytest.mark.parametrize("row_tokens", [16_384, 150, 1])
def test_falls_are_those_of_transformers(row_tokens: int, tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    save(parts, tmp_path)
    words, recipe = [f"train.max_tokens_per_microbatch={row_tokens}"], shipped_recipes()["shapes"]
    target = ModelTarget(name="tiny", path=str(tmp_path))
    with Occluder.of(target, words, print, recipe=recipe, split="test") as occluder:
        (made,) = occluder.maps([Asked(row=2, answer=ANSWER)], Wanted(patch_px=SIDE), print)
    found = made.map
    environment = Shapes(ShapesEnvironment(), seed=0)
    task = environment.tasks("test")[2]
    (message,) = environment.prompt(task)
    pixels = task.images[0].source
    assert isinstance(pixels, np.ndarray)
    answer_T = np.array(parts.processor.tokenizer(ANSWER, add_special_tokens=False)["input_ids"])

    def logprob(shown: np.ndarray) -> float:
        seen = [ImageRef(source=shown) if isinstance(part, ImageRef) else part for part in message.parts]
        prompt = renderer(parts).prompt([replace(message, parts=tuple(seen))])
        return float(reference_logprobs(parts, prompt, answer_T).sum().detach())

    whole = logprob(pixels)
    assert found.logprob == pytest.approx(whole, abs=1e-4)
    assert found.falls_RC.shape == (3, 3)
    for row, column in np.ndindex(3, 3):
        hidden = pixels.copy()
        hidden[SIDE * row : SIDE * (row + 1), SIDE * column : SIDE * (column + 1)] = pixels.mean((0, 1)).round()
        assert found.falls_RC[row, column] == pytest.approx(whole - logprob(hidden), abs=1e-4)
    assert np.abs(found.falls_RC).max() > 1e-3, "a tiny model reads its picture"
    assert np.allclose(made.numbers.falls, found.falls_RC, rtol=1e-3)


def test_the_command_writes_the_picture_and_the_numbers(tmp_path: Path) -> None:
    save(tiny("qwen3_vl"), tmp_path / "model")
    out = tmp_path / "maps" / "map.png"
    words = ["saliency", str(tmp_path / "model"), "--recipe", "shapes", "--patch-px", "24", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == str(out)
    numbers = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert (numbers["id"], np.shape(numbers["falls"]), numbers["patch_px"]) == ("test/0", (2, 2), 24)
    assert (numbers["size"], numbers["weights"]) == ([48, 48], str(tmp_path / "model"))
    assert Image.open(out).size == (48, 48)


def test_the_picture_is_lit_where_the_log_prob_falls_most() -> None:
    found = OcclusionMap(logprob=-1.0, falls_RC=np.array([[0.0, 2.0], [-5.0, 1.0]], np.float32), side_px=4)
    shown_YXC = np.asarray(found.over(Image.new("RGB", (7, 8), (200, 100, 0))))
    assert shown_YXC.shape == (8, 7, 3)
    assert shown_YXC[[0, 4, 0], [0, 0, 4]].tolist() == [[30, 30, 30], [30, 30, 30], [200, 100, 0]]
    assert 30 < shown_YXC[4, 4, 0] < 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint, answers and samples."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = ("max_steps=1", "checkpoint.every_steps=1", "log.samples_every_steps=1", "rollout.max_new_tokens=6")
    fovea_here("train", "recipes/shapes.yaml", f"run_dir={folder}", *QUICK, *settings)
    return folder


def error_of(*words: str) -> str:
    """The one error line of the command."""
    done = CliRunner().invoke(app, ["saliency", *words])
    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


def saliency(run: Path, *words: str) -> list[AnswerMap]:
    """The maps that a command has written into the folder of a run, which is empty before."""
    for path in (run / FOLDER).glob("*"):
        path.unlink()
    fovea_here("saliency", str(run), "--patch-px", "24", *words)
    assert len(list((run / FOLDER).glob("*.png"))) == len(list((run / FOLDER).glob("*.json")))
    return list(read_maps(run).values())


def test_maps_of_greedy_answers_are_on_the_page(run: Path) -> None:
    made = saliency(run, "--rows", "0-2,5")
    assert [one.id for one in made] == ["test/0", "test/1", "test/2", "test/5"]
    assert {one.weights for one in made} == {"step-1"}
    answers = {row["id"]: row["answers"][0]["turns"][0]["text"] for row in ViewedRun(run).answers(0)["rows"]}
    assert [one.answer for one in made] == [answers[one.id] for one in made], "answers of the same weights"
    page = (run / FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<img src="(test-00000\d)-', page) == [f"test-00000{row}" for row in (0, 1, 2, 5)]
    assert {*re.findall(r'<img src="([^"]+)"', page)} == {path.name for path in (run / FOLDER).glob("*.png")}


def test_maps_of_recorded_answers_are_of_these_answers(run: Path) -> None:
    record = read_step(run, 1)[1]
    (made,) = saliency(run, "--recorded", "1:2:3")
    assert (made.id, made.answer) == (record.id, record.answers[2].turns[0].text)
    (before,) = saliency(run, "--recorded", "test-before", "--row", "3")
    number = list(ViewedRun(run).facts()["evaluations"]).index("test-before")
    (row,) = [row for row in ViewedRun(run).answers(number)["rows"] if row["index"] == 3]
    assert (before.id, before.answer) == (row["id"], row["answers"][0]["turns"][0]["text"])


def test_a_checkpoint_writes_into_its_run_unless_a_file_is_named(run: Path, tmp_path: Path) -> None:
    saliency(run)
    checkpoint = run / "checkpoints" / "step-1"
    assert find_checkpoint(checkpoint).run == run.resolve()
    fovea_here("saliency", str(checkpoint), "--patch-px", "24", "--row", "1")
    assert len(read_maps(run)) == 2
    fovea_here("saliency", str(run), "--patch-px", "24", "--row", "2", "--out", str(tmp_path / "one.png"))
    assert len(read_maps(run)) == 2
    assert (tmp_path / "one.json").is_file()


def test_no_link_of_a_run_is_written_through(run: Path, tmp_path: Path) -> None:
    saliency(run)
    (picture,) = (run / FOLDER).glob("*.png")
    picture.unlink()
    picture.symlink_to(tmp_path / "elsewhere.png")
    fovea_here("saliency", str(run), "--patch-px", "24")
    assert not (tmp_path / "elsewhere.png").exists()
    shutil.rmtree(run / FOLDER)
    (run / FOLDER).symlink_to(tmp_path)
    assert "leads out of" in error_of(str(run), "--patch-px", "24")
    assert list(tmp_path.iterdir()) == []
    (run / FOLDER).unlink()


def test_a_full_folder_takes_no_more(run: Path) -> None:
    saliency(run)
    for number in range(MAX_MAPS - 1):
        (run / FOLDER / f"{number}.json").touch()
    assert f"has {MAX_MAPS} maps, and 1 more exceed the limit of {MAX_MAPS}; delete some" in error_of(str(run))
    saliency(run)


@table(
    ("words", "message"),
    [
        (["--recorded", "test-later"], "has no answers of that name; give one of test-final, test-before"),
        (["--recorded", "9:1:1"], "has no samples of step 9; `fovea view` lists them"),
        (["--recorded", "1:7:1"], "--recorded 1:7:1: step 1 has groups 1 to 4"),
        (["--recorded", "1:0:1"], "step 1 has groups 1 to 4"),
        (["--recorded", "1:1:5"], "step 1 has answers 1 to 4 in that group"),
        (
            ["--recorded", "test-final", "--row", "700"],
            "--row 700: test-final has no answer to this row, only to 16",
        ),
        (["--recorded", "1:1:1", "--rows", "0-1"], "--recorded 1:1:1 is a single answer with a known row; drop --rows"),
        (["environment.level=2"], "environment.level changes the rows"),
        (["seed=2"], "seed changes the rows"),
        (["--recipe", "shapes"], "--recipe changes the rows"),
        (["--recorded", "test-final", "--answer", "red"], "--answer and --recorded both name the answer"),
        (["--rows", "0,1", "--out", "map.png"], "2 rows, but --out map.png takes one map; ask for one row"),
    ],
)
def test_wrong_words_about_a_run_are_one_line(run: Path, words: list[str], message: str) -> None:
    assert message in error_of(str(run), *words)


def test_rows_are_numbers_and_ranges() -> None:
    assert row_numbers("3") == [3]
    assert row_numbers("0-3, 2,7") == [0, 1, 2, 3, 7]
    for text in ("", "a", "-1", "3-1", "1.5", "0-1000", "1-2-3", "1,"):
        with pytest.raises(ConfigError, match="give numbers from 0"):
            row_numbers(text)


@table(
    ("words", "message"),
    [
        (["majority"], "majority has no weights here to make maps with; name a run"),
        (["MODEL", "--row", "5000"], "--row 5000: the test split has rows 0 to"),
        (["MODEL", "--image", "2"], "--image 2: the prompt of test/0 has 1 picture(s)"),
        (["MODEL", "--patch-px", "1"], "has 2304 patches, above the limit of 1024; set a larger patch"),
        (["MODEL", "--answer", ""], "the answer has no tokens; give a text"),
        (["MODEL", "OTHER"], "OTHER: fovea saliency takes only one model"),
        (["MODEL", "--recorded", "test-final"], "is not a run, so it has no recorded answers; name a run"),
        (["MODEL", "--rows", "0-1"], "is not a run and stores no maps; ask for one row"),
        (["MODEL", "--out", "map.jpg"], "--out map.jpg: the file is a PNG picture; name it map.png"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    save(tiny("qwen3_vl"), tmp_path)
    named = [str(tmp_path) if word == "MODEL" else word for word in words]
    assert message in error_of(*named, "--recipe", "shapes")


def map_of(task_id: str, answer: str, **changed: Any) -> AnswerMap:
    """A map of a picture in four patches, of which the lower two are cut."""
    picture = {"image": 1, "size": (64, 48), "patch_px": 32, "falls": ((0.5, 1.0), (0.0, -2.0))}
    given = {"question": "How many?", "weights": "step-5", "logprob": -0.25, **picture, **changed}
    return AnswerMap(id=task_id, answer=answer, **given)


def keep_map(folder: Path, made: AnswerMap) -> Path:
    """Write a map into a run's folder; returns its file."""
    path = map_path(folder, "test", 0, made)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_map(path, made)
    return path


def test_a_later_map_of_an_answer_takes_the_place_of_the_first(tmp_path: Path) -> None:
    paths = {keep_map(tmp_path, map_of("test/0", "3", weights=weights)) for weights in ("step 1", "step 2")}
    ((path, found),) = read_maps(tmp_path).items()
    assert (paths, found.weights) == ({path}, "step 2")


def test_the_page_shows_every_map_beside_its_picture(tmp_path: Path) -> None:
    kept = [keep_map(tmp_path, map_of(f"test/{row}", answer)) for row, answer in enumerate(("a red box", "3"))]
    page = write_page(tmp_path)
    assert page == tmp_path / "saliency" / "index.html"
    text = page.read_text(encoding="utf-8")
    said = (
        "test/1, picture 1, step-5",
        "How many?\n<b>a red box</b>",
        "log-prob -0.25, up to 1 lower with 32 px hidden",
    )
    assert [part for part in (*said, *(f'src="{path.stem}.png"' for path in kept)) if part not in text] == []


def test_text_of_a_stranger_is_shown_as_text(tmp_path: Path) -> None:
    keep_map(tmp_path, map_of(ATTACK, f"{ATTACK}\ud800", weights=ATTACK))
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in text
    assert text.count(escape(ATTACK)) == 3
    assert "default-src 'none'" in text


def test_no_link_in_the_place_of_the_page_is_written_through(tmp_path: Path) -> None:
    keep_map(tmp_path / "run", map_of("test/0", "3"))
    (tmp_path / "run" / FOLDER / "index.html").symlink_to(tmp_path / "elsewhere.html")
    assert not write_page(tmp_path / "run").is_symlink()
    assert not (tmp_path / "elsewhere.html").exists()


NO_ROWS = ([0.0], [0.0, "much"], [0.0, float("nan")])


@table(
    "change",
    [
        *({"falls": falls} for falls in (None, [[0.5, 1.0]], *([[0.5, 1.0], row] for row in NO_ROWS))),
        *({"patch_px": patch_px} for patch_px in (0, 1, "32")),
        *({"size": size} for size in ([64], [64, -48], [10**400, 48])),
        *({"image": 0}, {"logprob": float("inf")}, {"answer": "x" * 300_000}),
    ],
)
def test_what_is_no_map_is_named(change: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = keep_map(folder, map_of("test/0", "3"))
    path.write_text(json.dumps({**asdict(map_of("test/0", "3")), **change}))
    with pytest.raises(DataError, match="delete") as refused:
        write_page(folder)
    assert str(path) in str(refused.value)


@table("content", ["", "[]", "3", '{"id": 3}', "[" * 100_000])
def test_other_content_is_no_map(content: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "a.json").write_text(content)
    with pytest.raises(DataError, match="is not a valid map"):
        read_maps(folder)


def test_a_link_out_of_the_run_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / FOLDER).mkdir(parents=True)
    write_map(tmp_path / "elsewhere.json", map_of("test/0", "3"))
    (folder / FOLDER / "a.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DataError, match="leads out of"):
        read_maps(folder)


def test_so_many_maps_are_read_and_no_more(tmp_path: Path) -> None:
    for number in range(MAX_MAPS + 3):
        keep_map(tmp_path, map_of(f"test/{number}", "3"))
    assert len(read_maps(tmp_path)) == MAX_MAPS


def test_a_map_has_at_most_so_many_patches() -> None:
    side = int(MAX_PATCHES**0.5)
    falls = ((0.0,) * side,) * side
    assert map_of("test/0", "3", size=(side, side), patch_px=1, falls=falls).size == (side, side)
    with pytest.raises(ValueError, match="falls are not 33 x 32 patches"):
        map_of("test/0", "3", size=(side, side + 1), patch_px=1, falls=(*falls, falls[0]))


def test_the_file_is_of_the_row_and_the_answer() -> None:
    first, second = (map_path(Path("run"), "test", 3, map_of("test/3", answer)) for answer in ("3", "\ud800"))
    assert first.name.startswith("test-000003-")
    assert first != second


def test_places_of_samples() -> None:
    place: Any = sample_place("50:1:3")
    assert (place.step, place.group, place.answer) == (50, 1, 3)
    assert sample_place("test-final") is sample_place("1:2") is sample_place("1:2:-3") is None
