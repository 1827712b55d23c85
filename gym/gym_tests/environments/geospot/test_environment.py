"""Tables of places: gold answers of every row and stage, columns by config, rows that are not places."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea_gym.environments.geospot.environment import GeoSpot
from fovea_gym.errors import DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import GeoSpotEnvironment
from gym_tests.environments.geospot.places import check_gold, geospot
from gym_tests.grading import scored
from gym_tests.images import png

OSV5M = Path(__file__).parents[5] / "shared" / "data" / "geospot" / "osv5m_fixture24.parquet"
PARIS = {"country": "France", "region": "Île-de-France", "city": "Paris", "lat": 48.86, "lon": 2.35}


def test_gold_answers_of_photos_score_full_marks() -> None:
    if not OSV5M.exists():
        pytest.skip(f"the shared photos are not here ({OSV5M})")
    environment = GeoSpot(GeoSpotEnvironment(train_files=(str(OSV5M),), test_files=(str(OSV5M),)), RowAccess())
    tasks = list(environment.tasks("test"))
    assert len(tasks) == 24
    check_gold(environment, tasks)
    assert min(ImageOpener(max_image_mib=9, max_image_megapixels=9)(tasks[0].images[0]).size) > 100


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
    with pytest.raises(DataError, match=r"^columns\.city: rows\.parquet\b"):
        geospot(tmp_path, [row], image_key="photo", columns={**columns, "city": "city"}).tasks("train")


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ({"country": "Atlantis"}, "'Atlantis' is not a known country"),
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
    assert "data." not in str(error.value)


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
        ({"weights": {"country": 0}}, "weights.country=0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GeoSpotEnvironment.model_validate({"train_files": ["a"], "test_files": ["b"], **settings})
