"""Tables of places: gold answers of every row and stage, columns by config, rows that are not places, drawn maps."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.wiring.run import build
from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.geospot.countries import country_name
from fovea_gym.environments.geospot.environment import GeoSpot
from fovea_gym.errors import DataError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.rows.rows import RowAccess
from fovea_gym.rows.tasks import kinds_of, levels_of
from fovea_gym.settings.environments import GeoSpotEnvironment
from fovea_gym.types import Task
from fovea_tools.data_sets.maps import map_cities, write_maps
from tests.grading import scored
from tests.images import png

ROOT = Path(__file__).parents[3]
OSV5M = ROOT.parent / "shared" / "data" / "geospot" / "osv5m_fixture24.parquet"
PARIS = {"country": "France", "region": "Île-de-France", "city": "Paris", "lat": 48.86, "lon": 2.35}


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_maps(tmp_path_factory.mktemp("maps"), num_rows=40, seed=0, image_side_px=64)


SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def geospot(folder: Path, rows: list[dict[str, object]], **settings: object) -> GeoSpot:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    files = (str(folder / "rows.parquet"),)
    config = {"train_files": files, "test_files": files, "dev_share": 0, **settings}
    return GeoSpot(GeoSpotEnvironment.model_validate(config), RowAccess())


def check_gold(environment: GeoSpot, tasks: list[Task]) -> None:
    for task in tasks:
        text, messages = environment.target(task), tuple(environment.prompt(task))
        assert len(environment.graders) == 5
        for stage, grader in enumerate(environment.graders):
            score = scored([grader], task, text, messages)
            assert (score.reward, score.accuracy) == (1.0, 1.0), (task.id, stage, text)
            assert {value for name, value in score.parts.items() if name != "distance_km"} == {1.0}
            assert score.parts.get("distance_km", 0.0) == pytest.approx(0.0, abs=0.1)


def test_gold_answers_of_drawn_maps_score_full_marks(maps: tuple[Path, Path]) -> None:
    environment: Environment = GeoSpot(
        GeoSpotEnvironment(train_files=(str(maps[0]),), test_files=(str(maps[1]),), level_key="level"), RowAccess()
    )
    assert isinstance(environment, GeoSpot)
    tasks = {split: list(environment.tasks(split)) for split in SPLITS}
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
        score = scored(environment.graders, task, environment.target(task))
        parts = dict(score.parts)
        assert (score.reward, parts.pop("distance_km"), set(parts.values())) == (1.0, 0.0, {1.0}), environment.target(
            task
        )


def test_gold_answers_of_photos_score_full_marks() -> None:
    if not OSV5M.exists():
        pytest.skip(f"the shared photos are not here ({OSV5M})")
    environment = GeoSpot(GeoSpotEnvironment(train_files=(str(OSV5M),), test_files=(str(OSV5M),)), RowAccess())
    tasks = list(environment.tasks("test"))
    assert len(tasks) == 24
    check_gold(environment, tasks)
    assert min(ImageOpener(max_mib=9, max_megapixels=9)(tasks[0].images[0]).size) > 100


def test_a_users_own_table(tmp_path: Path) -> None:
    """`image_url` without a region, as in the public workflow."""
    (tmp_path / "a.png").write_bytes(png(width=40))
    row = {"image_url": "a.png", "country": "France", "city": "Paris", "lat": 48.86, "lon": 2.35}
    environment = geospot(tmp_path, [row], system_prompt="You know the world.", prompt="Where?")
    (task,) = environment.tasks("test")
    assert environment.target(task) == "City: Paris\nCountry: France\nLatitude: 48.86\nLongitude: 2.35"
    assert task.answer == "Paris, France, 48.8600, 2.3500"
    assert [message.role for message in environment.prompt(task)] == ["system", "user"]
    assert environment.prompt(task)[1].parts == (task.images[0], "Where?")
    check_gold(environment, [task])


def test_columns_by_other_names(tmp_path: Path) -> None:
    row = {"photo": png(width=40), "land": "FR", "state": "IDF", "town": "Paris", "y": 48.86, "x": 2.35}
    columns = {"country": "land", "region": "state", "city": "town", "lat": "y", "lon": "x"}
    environment = geospot(tmp_path, [row], image_key="photo", columns=columns)
    check_gold(environment, list(environment.tasks("train")))
    with pytest.raises(DataError, match=r"environment\.columns\.city: rows\.parquet has no column 'city'"):
        geospot(tmp_path, [row], image_key="photo", columns={**columns, "city": "city"}).tasks("train")


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ({"country": "Atlantis"}, "'Atlantis' is not a country we know"),
        ({"country": None}, "the country is empty, so the first stages have nothing to ask for"),
        ({"lat": 95.0}, "lat is 95, beyond 90 degrees"),
        ({"lon": None}, "one of lat and lon is empty"),
        ({"image": None}, "there is no picture"),
    ],
)
def test_rows_that_are_no_places(cells: dict[str, object], problem: str, tmp_path: Path) -> None:
    good: dict[str, object] = {"image": png(width=40), **PARIS}
    tasks = geospot(tmp_path, [good, good | cells]).tasks("train")
    assert tasks[0].answer.startswith("Paris")
    with pytest.raises(DataError) as error:
        tasks[1]
    assert str(error.value).startswith("rows.parquet row 1: ")
    assert problem in str(error.value)
    assert str(error.value).endswith("or set data.on_bad_row=skip")


def test_a_wrong_answer_says_which_part_is_wrong(tmp_path: Path) -> None:
    environment = geospot(tmp_path, [{"image": png(width=40), **PARIS}])
    (task,) = environment.tasks("test")
    score = scored(environment.graders, task, "Lyon, Île-de-France, France, 48.86, 2.35")
    assert score.reward == pytest.approx(0.8)
    assert score.accuracy == 1.0
    graded = {"country": 1.0, "region": 1.0, "city": 0.0, "coordinates": 1.0}
    within = {f"within_{limit}_km": 1.0 for limit in (500, 200, 100, 50, 25)}
    assert score.parts == graded | within | {"distance_km": 0.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerances_km": [500, 200, 200, 50, 25]}, "each stage must be stricter than the one before it"),
        ({"weights": {"country": 0}}, "environment.weights.country=0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GeoSpotEnvironment.model_validate({"train_files": ["a"], "test_files": ["b"], **settings})


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
    overrides = [
        f"environment.train_files=[{maps[0]}]",
        f"environment.test_files=[{maps[1]}]",
        f"run_dir={tmp_path}",
        "max_steps=2",
        "warmup=null",
        "curriculum.starts=[1,2,3,4]",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=4",
        "log.tensorboard=false",
        "log.progress=false",
    ]
    config = load_config([ROOT / "recipes" / "geospot.yaml"], overrides)
    assert isinstance(config, Config)
    train(build(config))
    rows = read_metrics(tmp_path)
    assert [(row["curriculum/stage"], row["curriculum/tolerance_km"]) for row in rows] == [(1, 500), (2, 200)]
    assert {"reward/country", "reward/city", "reward/coordinates"} <= rows[0].keys()
