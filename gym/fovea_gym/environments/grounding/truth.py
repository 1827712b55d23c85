"""The true places of a row: reads them from a cell, and converts them to and from the text in a task."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from fovea_gym.environments.dataset_prompts import bad_row
from fovea_gym.environments.grounding.grade import MOST_PLACES
from fovea_gym.environments.grounding.reading import Numbers, read_answer
from fovea_gym.settings.grounding import TRUTH_NAMES, BoxForm


def places_of(cell: object, where: str, *, form: BoxForm = "xyxy", points: bool = False) -> tuple[Numbers, ...]:
    """The places in a cell: numbers, a list of places, mappings with one of the usual keys, or a text with places.

    BadRowError for anything else. With `points` a text `(1,2),(3,4)` has two points.
    """
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if isinstance(cell, str):
        places: Sequence[Numbers] = _written(cell, where, points=points)
    elif isinstance(cell, Mapping):
        key = next((key for key in TRUTH_NAMES if cell.get(key) is not None), None)
        if key is None:
            raise bad_row(where, f"a true place is an object without {', '.join(TRUTH_NAMES[:-2])}", "answer_kind")
        return places_of(cell[key], where, form=form, points=points)
    elif isinstance(cell, list | tuple) and cell and all(_is_number(number) for number in cell):
        places = [tuple(map(float, cell))]
    elif isinstance(cell, list | tuple):
        return tuple(place for each in cell for place in places_of(each, where, form=form, points=points))
    elif cell is None:
        raise bad_row(where, "the true place is missing, so no response can be right", "answer_missing")
    else:
        raise bad_row(where, f"the true place is of type {type(cell).__name__}, not a list of numbers", "answer_kind")
    return tuple(_corners(place, where, form) for place in places)


def as_text(places: Sequence[Numbers]) -> str:
    """True places as JSON: the answer of a task."""
    return json.dumps([[_short(number) for number in place] for place in places])


def from_text(text: str) -> tuple[Numbers, ...]:
    """The places that `as_text` has written."""
    return tuple(tuple(map(float, place)) for place in json.loads(text))


def _written(text: str, where: str, *, points: bool) -> Sequence[Numbers]:
    answer = read_answer(text, points=points, most=MOST_PLACES)
    if not answer.places and not answer.says_none:
        raise bad_row(where, f"the true place is {text[:60]!r}, which holds neither box nor point", "answer_kind")
    return answer.places


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _corners(place: Numbers, where: str, form: BoxForm) -> Numbers:
    """A point, or a box converted to its corners; BadRowError for other numbers."""
    if len(place) not in (2, 4) or not all(map(math.isfinite, place)):
        problem = f"a true place is {list(place)[:8]}, not a box of four numbers or a point of two"
        raise bad_row(where, problem, "answer_kind")
    if len(place) == 4 and form == "xywh":
        left, top, width, height = place
        return left, top, left + width, top + height
    return place


def _short(number: float) -> float:
    return int(number) if number == int(number) else number
