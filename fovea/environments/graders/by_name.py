"""Graders for answers in a file: the same code that scores a run, applied to a prediction and its row's `truth`.

A grader takes a prediction, its row, and the words by which an error names the row. It raises DataError where the
truth is missing or of a kind that the environment does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import ModuleType
from typing import TypeAlias

from fovea.config.environments import Gradable
from fovea.environments import caption, geo3k, vqa
from fovea.environments.caption import captions_of
from fovea.environments.dataset_prompts import bad_row, never_right, plain_answer
from fovea.environments.graders.base import Grade
from fovea.environments.graders.cider import IDF_ROWS, CiderD
from fovea.environments.graders.vqa_words import options_of, true_letter
from fovea.environments.shapes import environment as shapes
from fovea.errors import BadRowError, DataError

Row: TypeAlias = Mapping[str, object]
OfflineGrader: TypeAlias = Callable[[str, Row, str], Grade]


def grader_of(name: Gradable, rows: Iterable[Row]) -> OfflineGrader:
    """The grader of an environment; only that of captions reads `rows`, for document frequencies.

    MissingExtraError where geospot's gazetteer is not installed.
    """
    if name == "geospot":
        from fovea.environments.geospot import reward  # noqa: PLC0415 (its gazetteer is an extra)

        return partial(_geospot, reward)
    if name == "caption":
        return partial(_caption, CiderD(islice(_reference_sets(rows), IDF_ROWS)))
    return _GRADERS[name]


def _geo3k(prediction: str, row: Row, where: str) -> Grade:
    truth = plain_answer(_truth(row, where), where)
    if not geo3k.is_gradable(truth):
        raise never_right(truth, where)
    return geo3k.grade(prediction, truth)


def _shapes(prediction: str, row: Row, where: str) -> Grade:
    return shapes.grade(prediction, plain_answer(_truth(row, where), where))


def _vqa(prediction: str, row: Row, where: str) -> Grade:
    """A row with `options` is multiple choice."""
    truth = _truth(row, where)
    if row.get("options") is None:
        truths = vqa.answers_of(_as_list(truth), where)
        if not vqa.is_gradable(truths):
            raise never_right(truths[0], where)
        return vqa.grade(prediction, truths)
    options = options_of(row["options"], where)
    return vqa.grade(prediction, true_letter(plain_answer(truth, where), options, where), options=options)


def _caption(cider: CiderD, prediction: str, row: Row, where: str) -> Grade:
    return caption.grade(prediction, captions_of(_truth(row, where), where), cider=cider)


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


_GRADERS: Mapping[Gradable, OfflineGrader] = {"geo3k": _geo3k, "vqa": _vqa, "shapes": _shapes}


def _truth(row: Row, where: str) -> object:
    truth = row.get("truth")
    if truth is None or truth == []:
        raise bad_row(where, "truth is missing, so nothing can be right", "answer_missing")
    return truth


def _as_list(truth: object) -> Sequence[object]:
    return truth if isinstance(truth, list) else [truth]


def _reference_sets(rows: Iterable[Row]) -> Iterator[list[str]]:
    """The references of each row; rows without a caption are counted when they are graded."""
    for row in rows:
        try:
            yield captions_of(_truth(row, "row"), "row")
        except DataError:
            continue
