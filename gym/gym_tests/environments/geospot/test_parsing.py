"""Answers as models write them; coordinates in all their forms; and 20,000 texts that are not answers."""

from __future__ import annotations

import json
from itertools import permutations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fovea_gym.environments.geospot.coordinates import degrees_text, parse_degrees, parse_point
from fovea_gym.environments.geospot.gazetteer import LatLon
from fovea_gym.environments.geospot.parsing import parse_answer
from fovea_gym.environments.geospot.reward import grade
from gym_tests.grading import within_a_second
from gym_tests.tables import table

TRUTH = {"country": "France", "region": "Île-de-France", "city": "Paris", "lat": 48.85, "lon": 2.35}
SYDNEY = -(33 + 52 / 60 + 10 / 3600)
PARIS = """
City: Paris\\nRegion: Île-de-France\\nCountry: France\\nLatitude: 48.85\\nLongitude: 2.35
**City:** Paris\\n**Region:** Île-de-France\\n**Country:** France\\n**Latitude:** 48.85\\n**Longitude:** 2.35
- **City**: Paris\\n- **Region**: Île-de-France\\n- **Country**: France\\n- **Latitude**: 48.85° N\\n- **Longitude**: 2.35° E
* City: "Paris"\\n* State/Province: 'Île-de-France'\\n* Country: “France”\\n* Latitude: 48,85\\n* Longitude: 2,35
1. City: Paris\\n2. State: Île-de-France\\n3. Country: France.\\n4. Lat: 48.85\\n5. Lon: 2.35
{"city": "Paris", "region": "Île-de-France", "country": "France", "latitude": 48.85, "longitude": 2.35}
```json\\n{\\n "City": "Paris",\\n "State": "Île-de-France",\\n "Country": "France",\\n "Latitude": "48.85° N",\\n "Lon": "2.35"\\n}\\n```
{"location": {"city": "Paris", "region": "Île-de-France", "country": "France"}, "coordinates": {"lat": 48.85, "lng": 2.35}}
{"city": "Paris", "province": "Île-de-France", "country": "France", "coordinates": [48.85, 2.35]}
{'city': 'Paris', 'region': 'Île-de-France', 'country': 'France', 'lat': 48.85, 'lon': 2.35}
Paris, Île-de-France, France, 48.85, 2.35
paris, île-de-france, france, 48,85, 2,35
Paris, Île-de-France, France (48.85, 2.35)
Paris, Île-de-France, France, 48.85° N, 2.35° E
I see a tower of iron.\\n\\n**Paris, Île-de-France, France, 48°51′N, 2°21′E**
City: Paris, Region: Île-de-France, Country: France, Latitude: 48.85, Longitude: 2.35
City: Paris | Region: Île-de-France | Country: France | Latitude: 48.85 | Longitude: 2.35
| City | Paris |\\n| Region | Île-de-France |\\n| Country | France |\\n| Latitude | 48.85 |\\n| Longitude | 2.35 |
City: Paris\\nRegion: Île-de-France\\nCountry: France\\nCoordinates: 48°51'00"N, 2°21'00"E
Location: Paris, Île-de-France, France\\nGPS coordinates: (48.85, 2.35)
<think>Country: Spain? City: Madrid</think>City: Paris\\nRegion: Île-de-France\\nCountry: France\\nCoordinates: 48.85 2.35
Country: Spain, maybe. No:\\nCity: Paris\\nRegion: Île-de-France\\nCountry: France\\nLatitude: 48.85\\nLongitude: 2.35
<answer>Paris, Île-de-France, France, 48.85, 2.35</answer> I am sure of it.
The answer is \\\\boxed{Paris, Île-de-France, France, 48.85, 2.35}
Country:\\nFrance\\nCity:\\nParis\\nRegion:\\nÎle-de-France\\nLatitude:\\n48.85\\nLongitude:\\n2.35
CITY: Paris\\nREGION: Île-de-France\\nCOUNTRY: France\\nLATITUDE: +48.85\\nLONGITUDE: +2.35
City = Paris\\nRegion = Île-de-France\\nCountry = France\\nLatitude = 48.85\\nLongitude = 2.35
> City: *Paris*\\n> Region: _Île-de-France_\\n> Country: `France`\\n> Latitude: 48.85\\n> Longitude: 2.35
City: Paris\\nRegion (state or province): Île-de-France\\nCountry: FR\\nLatitude (approx): 48.85\\nLongitude (approx): 2.35
"""


@table("text", PARIS.strip().splitlines())
def test_forms_of_one_answer(text: str) -> None:
    text = text.replace("\\n", "\n").replace("\\\\", "\\")
    assert parse_answer(text).at == pytest.approx((48.85, 2.35), abs=1e-9)
    assert grade(text, TRUTH).score == pytest.approx(1.0, abs=1e-9)


@table(
    "degrees",
    [
        "Latitude: –33.87\nLongitude: 151.21",  # an en dash is a sign, no bullet
        "Latitude: - 33.87\nLongitude: 151.21",
        "**Latitude:** − 33.87\n**Longitude:** 151.21",
        "Latitude: minus 33.87\nLongitude: 151.21",
        "Latitude: 33.87 (S)\nLongitude: 151.21 (E)",
        "Latitude: 33.87° (South)\nLongitude: 151.21° (East)",
        "Latitude: 33.87° Sur\nLongitude: 151.21° Este",
        "Latitude: 33,87° Süd\nLongitude: 151,21° Ost",
        "Latitude -33.87\nLongitude 151.21",
        "It lies at latitude 33.87° S, longitude 151.21° E.",
        "Latitude:\n- 33.87° S\nLongitude:\n- 151.21° E",
    ],
)
def test_no_sign_is_lost(degrees: str) -> None:
    assert parse_answer(f"City: Sydney\nCountry: Australia\n{degrees}").at == pytest.approx((-33.87, 151.21))


@table("lon", ["-0.00005", "-5e-05", "-5E-5", '"-0.00005"'])
@table("form", ['"lat": 51.47, "lon": {lon}', '"coordinates": [51.47, {lon}]'])
def test_small_numbers_of_json_are_no_degrees_east(form: str, lon: str) -> None:
    """Python writes them as -5e-05, where 5e is 5 degrees east."""
    answer = parse_answer(f'{{"country": "UK", {form.format(lon=lon)}}}')
    assert answer.at == LatLon(51.47, -0.00005)


@table("degrees", [-33.869722222222222, 0.1, 1e-5, -1.1102230246251565e-16, 1e-300, 0.0])
def test_degrees_are_read_as_they_are_written(degrees: float) -> None:
    assert parse_degrees(degrees_text(degrees), "lat") == pytest.approx(degrees, rel=0, abs=1e-20)


def test_alternatives_inside_an_object_are_not_the_answer() -> None:
    other = [{"city": "Paris", "country": "France"}, {"city": "Rome", "country": "Italy"}]
    answer = parse_answer(json.dumps({"city": "Sydney", "country": "Australia", "alternatives": other}))
    assert (answer.city, answer.country) == ("Sydney", "Australia")
    nested = {"guess": {"city": "Sydney", "country": "Australia"}, "alternatives": other}
    assert parse_answer(json.dumps(nested)).country == "Australia"


@table(
    ("text", "fields"),
    [
        ("", (None, None, None, None)),
        ("I cannot tell.", (None, None, None, None)),
        ("France", ("France", None, None, None)),
        ("Lyon, France", ("France", None, "Lyon", None)),
        ("Los Angeles, CA", (None, None, None, None)),  # California, not Canada
        ("City: Unknown\nRegion: N/A\nCountry: France\nLatitude: ?\nLongitude: 2.35", ("France", None, None, None)),
        ("Latitude: -33.87\nLongitude: 151.2", (None, None, None, LatLon(-33.87, 151.2))),
        ("- Latitude: −33.87\n- Longitude: −70.5", (None, None, None, LatLon(-33.87, -70.5))),
        ("Latitude: 95\nLongitude: 2.35", (None, None, None, None)),
        ("Latitude: 12\nLongitude: 181", (None, None, None, None)),
        ("Latitude: 48.85", (None, None, None, None)),
        ("Latitude: 2.35° E\nLongitude: 48.85° N", (None, None, None, None)),
        ("Coordinates: 151.2 E, 33.87 S", (None, None, None, LatLon(-33.87, 151.2))),
        ('{"country": "UK", "lat": 51.47, "lon": 1e22}', ("UK", None, None, None)),
        *(
            (
                f"Sydney, New South Wales, Australia, {at}",
                ("Australia", "New South Wales", "Sydney", LatLon(-33.87, 151.21)),
            )
            for at in ("33.87° S, 151.21° E", "lat -33.87, lon 151.21")
        ),
        ("Washington, D.C., Maryland, USA, 38.9, -77.04", ("USA", "Maryland", "Washington", LatLon(38.9, -77.04))),
        ("City: Halle (Saale)\nRegion: Hesse\nCountry: Germany", ("Germany", "Hesse", "Halle (Saale)", None)),
        *((f"Country: Thailand\nCity: {city}", ("Thailand", None, None, None)) for city in ("nan", "NaN", "NAN")),
        ("Country: Thailand\nCity: Nan", ("Thailand", None, "Nan", None)),  # not what programs write for nothing
    ],
)
def test_what_is_there_and_what_is_not(text: str, fields: tuple[object, ...]) -> None:
    answer = parse_answer(text)
    assert (answer.country, answer.region, answer.city, answer.at) == fields


@table(
    ("text", "degrees"),
    [
        *((text, -33.87) for text in ("-33.87", "−33.87", "−33,87", "33.87° S", "33.87°S", "S 33.87", "33.87 s")),
        *(
            (text, -33.87)
            for text in ("33.87 degrees south", "- 33.87", "-33.87° S", "33,87° South", "–33.87", "－33.87")
        ),
        *((text, SYDNEY) for text in ("33°52′10″S", "33° 52' 10\" S", "33°52’10”S", "33 52 10 S", "33°52'10''S")),
        *((text, SYDNEY) for text in ("33d 52m 10s S", "33 deg 52 min 10 sec S", "33:52:10 S", "S 33° 52' 10\"")),
        *(("**-33.87**", -33.87), ("33° 52.5' S", -33.875), ("~48.85 (estimated)", 48.85), ("+48.85", 48.85)),
        *(("48º", 48.0), ("１２.５", 12.5), ("90", 90.0)),
        *((text, None) for text in ("90.01", "151.2", "2.35° E", "unknown", "", "1234", "48.85.12", "48°60'N", "nan")),
        *((text, None) for text in ("-", "-33.8688151.2093")),
    ],
)
def test_latitudes(text: str, degrees: float | None) -> None:
    assert parse_degrees(text, "lat") == (None if degrees is None else pytest.approx(degrees, abs=1e-9))


@table(
    ("text", "point"),
    [
        *(
            (text, (48.85, 2.35))
            for text in ("48.85, 2.35", "(48.85,2.35)", "48,85; 2,35", "48,85, 2,35", "48,85 2,35")
        ),
        *((text, (48.85, 2.35)) for text in ("48.85N 2.35E", "N48.85 E2.35", "2.35° E, 48.85° N", "48°51′N 2°21′E")),
        ("40.7128° N, 74.006° W", (40.7128, -74.006)),
        ("-33.87,-151.21", (-33.87, -151.21)),
        *((text, None) for text in ("1, 2, 3", "91, 2", "48.85", "", "12.5 N, 13.5 N", "-33.8688-151.2093")),
    ],
)
def test_points(text: str, point: tuple[float, float] | None) -> None:
    assert parse_point(text) == (None if point is None else pytest.approx(point, abs=1e-9))


PIECES = st.sampled_from(
    'City: |Country: |Region: |Latitude: |Longitude: |Coordinates: |Location: |{|}|"country": |[|]|**|\n|, |France|Paris|'
    "48.85|°|'|\"|N|S|-|−|1e999|\\boxed{|<answer>|</think>|\ud800|\x00|🇫🇷|((((|null|NaN|| - |9999999999|Korea|(".split(
        "|"
    )
)
TEXTS = st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=40).map("".join))


@pytest.fixture(autouse=True, scope="module")
def gazetteer() -> None:
    """Read once, before anything is timed."""
    grade("City: x\nRegion: y\nCountry: z", TRUTH)


def check_any_text(text: str) -> None:
    given = within_a_second(lambda: grade(text, TRUTH))
    assert 0 <= given.score <= 1
    assert all(0 <= part <= 1 for part in given.parts.values())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS)
def test_any_text_gets_a_score(text: str) -> None:
    check_any_text(text)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS)
def test_twenty_thousand_texts_get_a_score(text: str) -> None:
    check_any_text(text)


@table(
    "text",
    [
        *(part * 50_000 for part in ('{"a":', "Country: ", "\\boxed{", "<answer>", "France, ")),
        *("{" * 200_000, "[" * 100_000, "1" * 300_000, "1,2," * 100_000, "- " * 200_000, "(" * 100_000 + ")" * 100_000),
        *("Country: " + "a" * 500_000, "Country: " + "republic of " * 10_000, "Country: France" + "\n" * 300_000),
        *("Latitude: " + "1°" * 100_000, '{"country": ' + "9" * 5000 + "}"),
        *(
            json.dumps(dict.fromkeys(("country", "latitude", "coordinates", "city"), value))
            for value in (None, True, 1, -1.5, [], {}, "x", [1, [2]], {"a": {"b": {"c": "d"}}})
        ),
    ],
)
def test_hostile_texts_and_json_of_all_kinds_take_no_time(text: str) -> None:
    check_any_text(text)


PLACES = [
    TRUTH,
    {"country": "Australia", "region": "New South Wales", "city": "Sydney", "lat": -33.87, "lon": 151.21},
    {"country": "Germany", "region": "Bavaria", "city": "Munich", "lat": 48.14, "lon": 11.58},
    {"country": "Japan", "region": "Hokkaido", "city": "Sapporo", "lat": 43.06, "lon": 141.35},
    {"country": "Brazil", "region": "Bahia", "city": "Salvador", "lat": -12.97, "lon": -38.5},
    {"country": "Niger", "region": "Niamey", "city": "Niamey", "lat": 13.51, "lon": 2.11},
    {"country": "Nigeria", "region": "Lagos", "city": "Lagos", "lat": 6.45, "lon": 3.39},
]
BETWEEN = [
    *(
        " or ",
        ", ",
        " / ",
        "; ",
        " and ",
        "\n",
        " - ",
        " (",
        " | ",
        ". ",
        " = ",
        ", not ",
        ": ",
        " & ",
        ", maybe ",
        "\n\n",
    ),
    *("\nCountry: ", ", Country: ", "\nCity: ", "\nRegion: ", "\nLocation: ", "</answer><answer>", r"} \boxed{"),
]
FORMS = [
    *("{}", "Country: {}", "City: {}", "Region: {}", "Location: {}", "It is {}.", "The answer is {}"),
    *('{{"country": "{}"}}', r"\boxed{{{}}}", "<answer>{}</answer>"),
]


def most_truths(answer: str) -> int:
    """The largest number of places that one part of an answer is right for."""
    right = [grade(answer, place).parts for place in PLACES]
    return max(sum(parts[part] == 1 for parts in right) for part in ("country", "region", "city"))


@pytest.mark.parametrize("form", FORMS)
def test_no_part_of_a_double_guess_is_right_twice(form: str) -> None:
    pairs = permutations(PLACES[:4], 2)
    names = [(str(one[part]), str(other[part])) for one, other in pairs for part in ("country", "region", "city")]
    answers = [form.format(f"{one}{between}{other}") for (one, other), between in product(names, BETWEEN)]
    assert [answer for answer in answers if most_truths(answer) > 1] == []


NAMES = st.sampled_from([str(value) for place in PLACES for value in place.values()])
GUESSES = st.tuples(NAMES, st.sampled_from(BETWEEN))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORMS), st.lists(GUESSES, min_size=2, max_size=8))
def test_no_list_of_places_is_right_twice(form: str, guesses: list[tuple[str, str]]) -> None:
    assert most_truths(form.format("".join(name + between for name, between in guesses))) <= 1
