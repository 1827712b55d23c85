"""Graders for answers in a file: the scoring code of a run, applied to a prediction and the `truth` of its row.

The graders of geo3k and vqa import only pydantic and start in a tenth of a second; the others are imported when named.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Literal, TypeAlias, get_args

from fovea_gym.environments.dataset_prompts import bad_row, never_right, plain_answer
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.graders import boxed_answer, vqa_answer
from fovea_gym.graders.base import Grade
from fovea_gym.graders.vqa_words import options_of, true_letter

Gradable: TypeAlias = Literal["geo3k", "vqa", "caption", "geospot", "shapes", "grounding"]
"""Environments whose answers can be graded offline."""
Row: TypeAlias = Mapping[str, object]
OfflineGrader: TypeAlias = Callable[[str, Row, str], Grade]


def check_grader(name: str, graders: Sequence[str] = get_args(Gradable)) -> None:
    """Raise ConfigError, with the closest name, for a name that is not in `graders`."""
    if name not in graders:
        near = difflib.get_close_matches(name, graders, n=1)
        fix = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(graders)}"
        raise ConfigError(f"there is no grader {name}; {fix}")


def grader_of(name: Gradable, rows: Iterable[Row]) -> OfflineGrader:
    """The grader of an environment; that of captions reads `rows`. MissingExtraError without geospot's gazetteer."""
    match name:
        case "geo3k":
            return _geo3k
        case "vqa":
            return _vqa
        case "shapes":
            from fovea_gym.environments.shapes import environment as shapes

            return lambda text, row, where: shapes.grade(text, plain_answer(_truth(row, where), where))
        case "grounding":
            from fovea_gym.environments.grounding import offline

            return offline.grade_row
        case "geospot":
            from fovea_gym.environments.geospot import reward

            return partial(_geospot, reward)
        case "caption":
            from fovea_gym.environments import caption

            def captions(row: Row, where: str) -> list[str]:
                return caption.captions_of(_truth(row, where), where)

            def references() -> Iterator[list[str]]:
                for row in rows:
                    with suppress(DataError):  # a row without a caption is counted later, when it is graded
                        yield captions(row, "row")

            cider = caption.CiderD(islice(references(), caption.IDF_ROWS))
            return lambda text, row, where: caption.grade(text, captions(row, where), cider=cider)


def _geo3k(prediction: str, row: Row, where: str) -> Grade:
    truths = boxed_answer.gold_answers(_truth(row, where), where)
    if not boxed_answer.is_gradable(truths):
        raise never_right(truths[0], where)
    return boxed_answer.grade(prediction, truths)


def _vqa(prediction: str, row: Row, where: str) -> Grade:
    """Grade a row of vqa; a row with `options` is multiple choice."""
    truth = _truth(row, where)
    if row.get("options") is None:
        truths = vqa_answer.answers_of(truth if isinstance(truth, list) else [truth], where)
        if not vqa_answer.is_gradable(truths):
            raise never_right(truths[0], where)
        return vqa_answer.grade(prediction, truths)
    options = options_of(row["options"], where)
    return vqa_answer.grade(prediction, true_letter(plain_answer(truth, where), options, where), options=options)


def _geospot(geospot: ModuleType, prediction: str, row: Row, where: str) -> Grade:
    truth = _truth(row, where)
    if not isinstance(truth, Mapping):
        problem = f"truth is of type {type(truth).__name__}, not an object with any of country, region, city, lat, lon"
        raise bad_row(where, problem, "answer_kind")
    place = geospot.place_of(truth, where=where)
    if not place.known:
        raise bad_row(where, "truth has none of country, region, city, lat, lon", "answer_missing")
    graded: Grade = geospot.grade(prediction, truth)
    return graded


def _truth(row: Row, where: str) -> object:
    truth = row.get("truth")
    if truth is None or truth == []:
        raise bad_row(where, "truth is missing, so no answer can be right", "answer_missing")
    return truth
