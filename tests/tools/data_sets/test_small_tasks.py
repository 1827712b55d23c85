"""Data sets that a tiny model learns: gold answers score full marks, no drawing is in two files, recipes run."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.environments.base import Split
from fovea.loop import train
from fovea.tools.data_sets.europe import REGIONS
from fovea.tools.data_sets.readable import KINDS, UNSEEN, is_unseen
from fovea.wiring.environment import make_environment
from fovea.wiring.run import build
from tests.grading import scored

ROOT = Path(__file__).parents[3]
SPLITS = {"train": 200, "validation": 10, "test": 20}
RECIPES = {"readable": "readable", "geospot-europe": "geospot_europe"}


def written(name: str, folder: Path, *options: str) -> Path:
    words = ["data", name, "--out", str(folder), "--rows", str(SPLITS["train"]), *options]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(folder / f"{split}.parquet") for split in SPLITS]
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: written(name, tmp_path_factory.mktemp(name)) for name in RECIPES}


def config_of(name: str, folder: Path, *overrides: str) -> Config:
    names = {"train": "train", "dev": "validation", "test": "test"}
    files = [f"environment.{split}_files=[{folder / f'{file}.parquet'}]" for split, file in names.items()]
    return load_config([ROOT / "recipes" / f"{RECIPES[name]}.yaml"], [*files, *overrides])


def pictures(folder: Path, split: str) -> list[bytes]:
    rows = pq.read_table(folder / f"{split}.parquet").to_pylist()
    assert len(rows) == SPLITS[split]
    return [(row["image"] if "image" in row else row["images"][0])["bytes"] for row in rows]


@pytest.mark.parametrize("name", RECIPES)
def test_every_gold_answer_scores_full_marks(name: str, folders: dict[str, Path]) -> None:
    made = make_environment(config_of(name, folders[name]))
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        for task in made.environment.tasks(split):
            score = scored(made.grading.graders, task, made.environment.target(task))
            assert (score.reward, score.accuracy) == (pytest.approx(1), 1), task


@pytest.mark.parametrize("name", RECIPES)
def test_no_drawing_is_in_two_files(name: str, folders: dict[str, Path]) -> None:
    drawings = [picture for split in SPLITS for picture in pictures(folders[name], split)]
    assert len(set(drawings)) == sum(SPLITS.values())


@pytest.mark.parametrize("name", RECIPES)
def test_seed_decides_the_files(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    same, other = written(name, tmp_path / "same"), written(name, tmp_path / "other", "--seed", "1")
    for split in SPLITS:
        assert (same / f"{split}.parquet").read_bytes() == (folders[name] / f"{split}.parquet").read_bytes()
        assert not set(pictures(other, split)) & set(pictures(folders[name], split))


def test_numbers_of_a_diagram_are_only_in_the_picture(folders: dict[str, Path]) -> None:
    rows = pq.read_table(folders["readable"] / "train.parquet").to_pylist()
    assert {row["kind"] for row in rows} == set(KINDS)
    assert len({row["problem"] for row in rows}) == len(KINDS)
    assert not any(character.isdigit() for row in rows for character in row["problem"])


def test_unseen_problems_are_in_the_test_file_only(folders: dict[str, Path]) -> None:
    kinds = {split: pq.read_table(folders["readable"] / f"{split}.parquet")["kind"].to_pylist() for split in SPLITS}
    assert {kind.removesuffix(UNSEEN) for kind in kinds["test"] if kind.endswith(UNSEEN)} == set(KINDS)
    assert not any(kind.endswith(UNSEEN) for split in ("train", "validation") for kind in kinds[split])


@pytest.mark.parametrize("kind", KINDS)
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
    rows = pq.read_table(folders["geospot-europe"] / "train.parquet").to_pylist()
    places = {(row["city"], row["region"], row["country"], row["lat"], row["lon"]) for row in rows}
    assert len(places) == len({place[2] for place in places}) == len(REGIONS) == 26
    assert None not in {part for place in places for part in place}


def test_places_held_out_are_in_no_other_file_and_nobody_asks_for_their_names(tmp_path: Path) -> None:
    written("geospot-europe", tmp_path, "--hold-out-places")
    rows = {split: pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in SPLITS}
    places = {split: {(row["lat"], row["lon"]) for row in rows[split]} for split in SPLITS}
    assert not places["test"] & (places["train"] | places["validation"])
    assert {row["country"] for row in rows["test"]} <= {row["country"] for row in rows["train"]}
    assert {(row["city"], row["region"]) for split in SPLITS for row in rows[split]} == {(None, None)}


@pytest.mark.parametrize(("degrees", "least", "most"), [(0, 0, 3), (3, 4, 10)])
def test_the_map_moves_below_the_mark(degrees: int, least: int, most: int, tmp_path: Path) -> None:
    """Widest spread of the marks of one city, in pixels of .9 degrees; a mark moves by a pixel itself."""
    written("geospot-europe", tmp_path, "--move-degrees", str(degrees))
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    marks: dict[str, list[int]] = {}
    for row in rows:
        map_YXC = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])), dtype=int)
        distance_YX = np.abs(map_YXC - (214, 24, 40)).sum(axis=2)  # from the mark's colour
        marks.setdefault(row["city"], []).append(int(distance_YX.argmin() % 64))
    assert least < max(max(places) - min(places) for places in marks.values()) < most


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_on_the_files(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    small = ["max_steps=2", "warmup.max_steps=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    small += ["rollout.max_new_tokens=4", "log.tensorboard=false", "evaluate.dev_size=2", "evaluate.test_size=2"]
    config = config_of(name, folders[name], f"run_dir={tmp_path / 'run'}", *small)
    train(build(config))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
