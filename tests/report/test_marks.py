from __future__ import annotations

from typing import Any

import pytest

from fovea.evaluation.records import AnsweredRow, RecordedImage, RecordedMessage
from fovea.report.answers import MAX_MARKS, marks_in, step_json
from fovea_gym.types import Mark
from gym_tests.tables import table
from tests.records import said

THOUSANDTHS = RecordedImage(name="0123456789abcdef", frame=(1000, 1000))
PIXELS = RecordedImage(name="0123456789abcdef", frame=(280, 140))


@table(
    ("text", "image", "marks"),
    [
        ("The cat is at (100,200),(500,600).", THOUSANDTHS, [((0.1, 0.2, 0.5, 0.6), "")]),
        ('[{"bbox_2d": [28, 14, 140, 70], "label": "cat"}]', PIXELS, [((0.1, 0.1, 0.5, 0.5), "cat")]),
        ('{"label": "eye", "point_2d": [70.0, 35]}', PIXELS, [((0.25, 0.25), "eye")]),
        (
            '[{"point_2d": [0, 0], "label": "a"}, {"point_2d": [1000, 500]}]',
            THOUSANDTHS,
            [((0, 0), "a"), ((1, 0.5), "")],
        ),
        ("f(2, 3) and the interval (1, 2)", THOUSANDTHS, []),
        ('{"bbox_2d": [1, 2, 3]}', THOUSANDTHS, []),
    ],
)
def test_forms_that_models_were_taught(text: str, image: RecordedImage, marks: list[Any]) -> None:
    assert marks_in(text, image, 3) == tuple(Mark(image=3, xy=pytest.approx(xy), label=label) for xy, label in marks)


def test_nothing_is_guessed_where_the_frame_is_not_known_and_a_flood_is_bounded() -> None:
    assert marks_in("(100,200),(500,600)", RecordedImage(name="0123456789abcdef"), 1) == ()
    assert marks_in("(100,200),(500,600)", None, 0) == ()
    assert len(marks_in("(1,2),(3,4) " * 100_000, THOUSANDTHS, 1)) == MAX_MARKS


def test_an_answer_that_the_environment_has_marked_is_not_read_again() -> None:
    """Its coordinates may be of another frame than the model's family has."""

    def marks(*given: Mark) -> list[str]:
        asked = {"id": "train/7", "question": "Where?", "truth": "", "kind": "box"}
        prompt = RecordedMessage(role="user", parts=(THOUSANDTHS, "Where?"))
        answer = said("(100,200),(500,600)", reward=1.0, accuracy=1.0, marks=given)
        record = AnsweredRow(**asked, messages=(prompt,), answers=(answer,))
        (group,) = step_json(1, [record])["groups"]
        return [mark["label"] for mark in group["answers"][0]["marks"]]

    truth, read = (Mark(image=1, xy=(0.1, 0.2, 0.5, 0.6), label=label) for label in ("truth", "answer"))
    assert marks() == [""]
    assert marks(truth) == ["truth", ""]
    assert marks(truth, read) == ["truth", "answer"]
