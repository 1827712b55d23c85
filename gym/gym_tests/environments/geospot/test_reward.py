"""GeoSpot: the reward by hand, stage by stage, and tables of places with gold answers of every row."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fovea_gym.environments.geospot.environment import GeoSpot
from fovea_gym.environments.geospot.gazetteer import LatLon, country_distance_km
from fovea_gym.environments.geospot.parsing import PlaceAnswer
from fovea_gym.environments.geospot.reward import PARTS, STAGES, WEIGHTS, KnownPlace, grade, grade_answer, place_of
from fovea_gym.errors import DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import GeoSpotEnvironment
from gym_tests.environments.geospot.places import check_gold, geospot
from gym_tests.grading import scored
from gym_tests.images import png
from gym_tests.tables import table

TRUTH = KnownPlace(country="FR", region="Île-de-France", city="Paris", at=LatLon(48.0, 2.0))
GOLD = PlaceAnswer(country="France", region="Île-de-France", city="Paris", at=LatLon(48.0, 2.0))
KM_PER_DEGREE = 111.1951


def test_the_stages_are_those_of_the_specification() -> None:
    assert [(stage.asks, stage.tolerance_km) for stage in STAGES] == [
        (("country",), 500),
        (("country",), 200),
        (("country", "region"), 100),
        (("country", "region", "city"), 50),
        (("country", "region", "city", "coordinates"), 25),
    ]
    assert [WEIGHTS[part] for part in PARTS] == [0.3, 0.2, 0.2, 0.3]


@table("stage", STAGES)
def test_the_gold_answer_scores_one_and_nothing_scores_nothing(stage: object) -> None:
    assert grade_answer(GOLD, TRUTH, stage).score == 1.0  # type: ignore[arg-type]
    assert grade_answer(PlaceAnswer(), TRUTH, stage).score == 0.0  # type: ignore[arg-type]


@table(
    ("answer", "scores"),
    [
        (PlaceAnswer(country="France"), (1, 1, 0.6, 3 / 7, 0.3)),  # what is missing stays in the sum
        (PlaceAnswer(country="France", region="Ile de France"), (1, 1, 1, 5 / 7, 0.5)),
        (PlaceAnswer(country="France", city="Paris"), (1, 1, 0.6, 5 / 7, 0.5)),
        (PlaceAnswer(region="Île-de-France", city="Paris"), (0, 0, 0.4, 4 / 7, 0.4)),
        (PlaceAnswer(at=LatLon(48.0, 2.0)), (0, 0, 0, 0, 0.3)),
        (PlaceAnswer(country="Atlantis", region="x", city="y"), (0, 0, 0, 0, 0)),
    ],
)
def test_rewards_by_hand(answer: PlaceAnswer, scores: tuple[float, ...]) -> None:
    assert [grade_answer(answer, TRUTH, stage).score for stage in STAGES] == pytest.approx(scores)


def test_coordinates_decay_with_the_distance() -> None:
    expected = 0.7 + 0.3 * math.exp(-0.5 * KM_PER_DEGREE / 25)
    assert grade_answer(replace(GOLD, at=LatLon(48.5, 2.0)), TRUTH).score == pytest.approx(expected, abs=1e-5)


def test_the_tolerance_tightens_from_stage_to_stage() -> None:
    """A near miss earns less in every stage; with coordinates, a wrong country earns nothing for itself."""
    distance_km = country_distance_km("BE", "FR") or math.nan
    credits = [grade_answer(replace(GOLD, country="Belgium"), TRUTH, stage).parts["country"] for stage in STAGES]
    assert credits == pytest.approx([*(math.exp(-distance_km / km) for km in (500, 200, 100, 50)), 0])
    assert all(later < earlier for earlier, later in pairwise(credits))
    far = grade_answer(PlaceAnswer(country="Japan"), TRUTH, STAGES[0]).score
    assert 0 < far < 1e-6 < grade_answer(PlaceAnswer(country="Belgium"), TRUTH, STAGES[0]).score


def test_a_part_that_the_truth_lacks_is_not_asked_for() -> None:
    truth = KnownPlace(country="FR", city="Paris")
    assert grade_answer(PlaceAnswer(country="France", city="Paris"), truth).score == 1.0
    assert grade_answer(PlaceAnswer(country="France"), truth).score == pytest.approx(0.6)
    assert grade_answer(PlaceAnswer(country="France"), truth, STAGES[2]).score == 1.0
    with pytest.raises(DataError, match=r"\bcity\b.*\bcountry\b"):
        grade_answer(PlaceAnswer(country="France"), KnownPlace(city="Paris"), STAGES[0])


def test_grades_of_objects() -> None:
    text = "City: Lyon\nCountry: France\nLatitude: 45.76\nLongitude: 4.84"
    given = grade(text, {"country": "FRA", "city": "Paris", "lat": 45.76, "lon": 4.84})
    assert given.score == pytest.approx(0.6 / 0.8)
    assert given.parts == {"country": 1.0, "city": 0.0, "coordinates": 1.0}
    assert given.reason == "country right; city 'Lyon' is not 'Paris'; 0 km off"
    assert grade("nowhere", {"lat": 1, "lon": 2}).reason == "coordinates missing"
    assert grade("Spain", {"country": "France"}).reason == "country 'Spain' is not 'France'"


@table(
    ("truth", "message"),
    [
        *((truth, "the truth has nothing") for truth in ({}, {"country": ""})),
        ({"country": "Atlantis"}, "'Atlantis' is not a known country; write its English name or ISO code"),
        ({"country": 3}, "country is of type int, not a text"),
        ({"lat": 91, "lon": 0}, "lat is 91, beyond 90 degrees"),
        ({"lat": 0, "lon": -180.5}, "lon is -180.5, beyond 180 degrees"),
        ({"lat": "north", "lon": 0}, "lat is 'north', not degrees"),
        ({"lat": 12}, "one of lat and lon is empty"),
        ({"lat": math.inf, "lon": 0}, "lat is inf, beyond 90 degrees"),
    ],
)
def test_truths_that_are_no_places(truth: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        grade("France", truth)


def test_empty_cells_are_unknown() -> None:
    cells = {"country": " FR ", "region": math.nan, "city": "", "lat": None, "lon": math.nan}
    assert place_of(cells) == KnownPlace(country="FR")
    assert place_of({"lat": "48.85", "lon": 2}).at == LatLon(48.85, 2.0)


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
    row = {"image_url": "a.png", **{key: value for key, value in PARIS.items() if key != "region"}}
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


@table(
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
    right = ("country", "region", "coordinates", *(f"within_{limit}_km" for limit in (500, 200, 100, 50, 25)))
    assert score.parts == dict.fromkeys(right, 1.0) | {"city": 0.0, "distance_km": 0.0}


@table(
    ("settings", "message"),
    [
        ({"tolerances_km": [500, 200, 200, 50, 25]}, "each stage must be stricter than the one before it"),
        ({"weights": {"country": 0}}, "weights.country=0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GeoSpotEnvironment.model_validate({"train_files": ["a"], "test_files": ["b"], **settings})
