"""Graders for answers in a file: the code that scores a run, applied to a prediction and the `truth` of its row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from types import ModuleType
from typing import TypeAlias

from fovea_gym.environments import caption, geo3k, vqa
from fovea_gym.environments.caption import IDF_ROWS, CiderD, captions_of
from fovea_gym.environments.dataset_prompts import bad_row, never_right, plain_answer
from fovea_gym.environments.grounding.grade import Rule, in_shares
from fovea_gym.environments.grounding.grade import grade as grade_places
from fovea_gym.environments.grounding.truth import places_of
from fovea_gym.environments.shapes import environment as shapes
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.graders.base import Grade
from fovea_gym.graders.vqa_words import options_of, true_letter
from fovea_gym.settings.environments import Gradable
from fovea_gym.settings.grounding import REWARD_KINDS

Row: TypeAlias = Mapping[str, object]
OfflineGrader: TypeAlias = Callable[[str, Row, str], Grade]


def grader_of(name: Gradable, rows: Iterable[Row]) -> OfflineGrader:
    """The grader of an environment; captions' reads `rows`. MissingExtraError without geospot's gazetteer."""
    if name == "geospot":
        from fovea_gym.environments.geospot import reward  # noqa: PLC0415 (its gazetteer is an extra)

        return partial(_geospot, reward)
    if name == "caption":
        cider = CiderD(islice(_reference_sets(rows), IDF_ROWS))
        return lambda prediction, row, where: caption.grade(prediction, _captions(row, where), cider=cider)
    return _GRADERS[name]


def _geo3k(prediction: str, row: Row, where: str) -> Grade:
    truths = geo3k.gold_answers(_truth(row, where), where)
    if not geo3k.is_gradable(truths):
        raise never_right(truths[0], where)
    return geo3k.grade(prediction, truths)


def _vqa(prediction: str, row: Row, where: str) -> Grade:
    """A row with `options` is multiple choice."""
    truth = _truth(row, where)
    if row.get("options") is None:
        truths = vqa.answers_of(truth if isinstance(truth, list) else [truth], where)
        if not vqa.is_gradable(truths):
            raise never_right(truths[0], where)
        return vqa.grade(prediction, truths)
    options = options_of(row["options"], where)
    return vqa.grade(prediction, true_letter(plain_answer(truth, where), options, where), options=options)


def _geospot(geospot: ModuleType, prediction: str, row: Row, where: str) -> Grade:
    truth = _truth(row, where)
    if not isinstance(truth, Mapping):
        problem = f"truth is of type {type(truth).__name__}, not an object with any of country, region, city, lat, lon"
        raise bad_row(where, problem, "answer_kind")
    try:
        place = geospot.place_of(truth, where=where)
    except DataError as error:
        raise BadRowError(str(error), "place") from error
    if not place.known:
        raise bad_row(where, "truth has none of country, region, city, lat, lon", "answer_missing")
    graded: Grade = geospot.grade(prediction, truth)
    return graded


def _grounding(prediction: str, row: Row, where: str) -> Grade:
    """`size` is in the units of the truth, `frame` in those of predictions; `ask` is read from the truth if missing."""
    truth = places_of(row.get("truth"), where)
    several = not (isinstance(row.get("truth"), list) and len(truth) == 1 and row["truth"] == list(truth[0]))
    kind = "point" if truth and len(truth[0]) == 2 else "box"
    ask = row.get("ask", {"box": "boxes", "point": "points"}[kind] if several else kind)
    if ask not in REWARD_KINDS or (ask in ("box", "point") and len(truth) != 1):
        problem = f"ask is {ask!r:.40}, not one of {', '.join(REWARD_KINDS)} that fits {len(truth)} true places"
        raise bad_row(where, problem, "answer_kind")
    size = _size(row.get("size"), where)
    rule = Rule(ask=ask, reward=REWARD_KINDS[ask][0])
    placed = grade_places(
        prediction, [in_shares(place, size) for place in truth], _size(row.get("frame", size), where), rule
    )
    return placed.as_grade(len(truth))


def _size(cell: object, where: str) -> tuple[float, float]:
    match cell:
        case int() | float() as width, int() | float() as height if width > 0 and height > 0:
            return float(width), float(height)
    problem = f"size and frame are a width and a height, such as [640, 480], not {cell!r:.40}"
    raise bad_row(where, problem, "answer_kind")


_GRADERS: Mapping[Gradable, OfflineGrader] = {
    "geo3k": _geo3k,
    "vqa": _vqa,
    "shapes": lambda prediction, row, where: shapes.grade(prediction, plain_answer(_truth(row, where), where)),
    "grounding": _grounding,
}


def _truth(row: Row, where: str) -> object:
    truth = row.get("truth")
    if truth is None or truth == []:
        raise bad_row(where, "truth is missing, so nothing can be right", "answer_missing")
    return truth


def _captions(row: Row, where: str) -> list[str]:
    return captions_of(_truth(row, where), where)


def _reference_sets(rows: Iterable[Row]) -> Iterator[list[str]]:
    for row in rows:
        with suppress(DataError):  # a row without a caption is counted when it is graded
            yield _captions(row, "row")
