"""Maps that `fovea data geospot` draws: gold answers, splits, and the recipe on them."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.wiring.run import build
from fovea_gym.environments.geospot.countries import country_name
from fovea_gym.environments.geospot.environment import GeoSpot
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.tasks import kinds_of, levels_of
from fovea_gym.settings.environments import GeoSpotEnvironment
from fovea_tools.data_sets.maps import map_cities, write_maps
from gym_tests.environments.geospot.places import check_gold, geospot
from gym_tests.grading import scored
from gym_tests.images import png

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_maps(tmp_path_factory.mktemp("maps"), num_rows=40, seed=0, image_side_px=64)


def test_gold_answers_of_drawn_maps_score_full_marks(maps: tuple[Path, Path]) -> None:
    train, test = ((str(file),) for file in maps)
    environment = GeoSpot(GeoSpotEnvironment(train_files=train, test_files=test, level_key="level"), RowAccess())
    tasks = {split: list(environment.tasks(split)) for split in ("train", "dev", "test")}
    assert {split: len(rows) for split, rows in tasks.items()} == {"train": 38, "dev": 2, "test": 4}
    check_gold(environment, [task for rows in tasks.values() for task in rows])
    assert set(levels_of(environment.tasks("train")) or ()) == {"wide", "medium", "close"}
    assert set(kinds_of(environment.tasks("dev"))) == {"all"}


@pytest.mark.slow
@pytest.mark.long
def test_gold_answers_of_every_place_that_a_map_may_show_score_full_marks(tmp_path: Path) -> None:
    """Nan is a city in Thailand, and no missing value."""
    places = [
        {"image": png(width=40), "country": country_name(spot.country), "region": spot.region, "city": spot.name}
        | {"lat": spot.at.lat, "lon": spot.at.lon}
        for spot in map_cities()
    ]
    assert len(places) > 30_000
    environment = geospot(tmp_path, places)
    for task in environment.tasks("train"):
        text = environment.target(task)
        score = scored(environment.graders, task, text)
        parts = dict(score.parts)
        assert (score.reward, parts.pop("distance_km"), set(parts.values())) == (1.0, 0.0, {1.0}), text


def test_maps_are_equal_for_one_seed_and_share_no_place(maps: tuple[Path, Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", "geospot", "--out", str(tmp_path), "--rows", "40", "--seed", "0"])
    assert result.exit_code == 0, result.output
    for file in maps:
        assert pq.read_table(tmp_path / file.name).equals(pq.read_table(file))
    train_rows, test_rows = (
        pq.read_table(file, columns=["country", "city", "lat", "lon"]).to_pylist() for file in maps
    )
    assert not [row for row in test_rows if row in train_rows]


def test_maps_show_land_of_several_countries_and_a_mark(maps: tuple[Path, Path]) -> None:
    rows = pq.read_table(maps[0]).to_pylist()
    for row in rows:
        image = Image.open(io.BytesIO(row["image"]["bytes"]))
        colours = {tuple(map(int, colour)) for _, colour in image.getcolors(64 * 64) or []}
        assert image.size == (64, 64)
        assert any(red > 180 and green < 90 and blue < 100 for red, green, blue in colours), "no mark"
        assert len(colours) > 20
    assert len({row["image"]["bytes"] for row in rows}) == len(rows)
    assert len({row["country"] for row in rows}) > 20


def test_the_recipe_takes_two_steps(maps: tuple[Path, Path], tmp_path: Path) -> None:
    overrides = [f"environment.train_files=[{maps[0]}]", f"environment.test_files=[{maps[1]}]", f"run_dir={tmp_path}"]
    overrides += ["max_steps=2", "warmup=null", "curriculum.starts=[1,2,3,4]", "rollout.prompts_per_step=2"]
    overrides += [
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=4",
        "log={tensorboard: false, progress: false}",
    ]
    train(build(load_config([ROOT / "recipes" / "geospot.yaml"], overrides)))
    rows = read_metrics(tmp_path)
    assert [(row["curriculum/stage"], row["curriculum/tolerance_km"]) for row in rows] == [(1, 500), (2, 200)]
    assert {"reward/country", "reward/city", "reward/coordinates"} <= rows[0].keys()
