"""Grades places in a file of answers, without an environment."""

from __future__ import annotations

from collections.abc import Mapping

from fovea_gym.environments.dataset_prompts import bad_row
from fovea_gym.environments.grounding.grade import Rule, grade, in_shares
from fovea_gym.environments.grounding.truth import places_of
from fovea_gym.graders.base import Grade
from fovea_gym.settings.grounding import REWARD_KINDS


def grade_row(prediction: str, row: Mapping[str, object], where: str) -> Grade:
    """The grade of a prediction in a file of answers.

    The row's `size` is in the units of the truth, its `frame` in those of the prediction; a missing `ask` is inferred
    from the truth.
    """
    truth = places_of(row.get("truth"), where)
    several = not (isinstance(row.get("truth"), list) and len(truth) == 1 and row["truth"] == list(truth[0]))
    kind = "point" if truth and len(truth[0]) == 2 else "box"
    ask = row.get("ask", {"box": "boxes", "point": "points"}[kind] if several else kind)
    if ask not in REWARD_KINDS or (ask in ("box", "point") and len(truth) != 1):
        problem = f"ask is {ask!r:.40}, not one of {', '.join(REWARD_KINDS)} that fits {len(truth)} true places"
        raise bad_row(where, problem, "answer_kind")
    size = _size(row.get("size"), where)
    rule = Rule(ask=ask, reward=REWARD_KINDS[ask][0])
    placed = grade(prediction, [in_shares(place, size) for place in truth], _size(row.get("frame", size), where), rule)
    return placed.as_grade(len(truth))


def _size(cell: object, where: str) -> tuple[float, float]:
    match cell:
        case int() | float() as width, int() | float() as height if width > 0 and height > 0:
            return float(width), float(height)
    problem = f"size and frame are a width and a height, such as [640, 480], not {cell!r:.40}"
    raise bad_row(where, problem, "answer_kind")
