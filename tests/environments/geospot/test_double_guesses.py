"""A double guess earns nothing twice: each part of an answer is right for one place at most."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.environments.geospot.reward import grade

PLACES = [
    {"country": "France", "region": "Île-de-France", "city": "Paris", "lat": 48.85, "lon": 2.35},
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
    "{}",
    "Country: {}",
    "City: {}",
    "Region: {}",
    "Location: {}",
    "It is {}.",
    "The answer is {}",
    '{{"country": "{}"}}',
    r"\boxed{{{}}}",
    "<answer>{}</answer>",
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


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.lists(
        st.tuples(
            st.sampled_from([str(value) for place in PLACES for value in place.values()]), st.sampled_from(BETWEEN)
        ),
        min_size=2,
        max_size=8,
    ),
)
def test_no_list_of_places_is_right_twice(form: str, guesses: list[tuple[str, str]]) -> None:
    assert most_truths(form.format("".join(name + between for name, between in guesses))) <= 1
