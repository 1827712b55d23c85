"""Places in responses: the forms of the model families, the final answer, floods and fragments."""

from __future__ import annotations

from time import perf_counter

import pytest

from fovea_gym.environments.grounding.reading import read_answer

BOX, POINT = (12.0, 40.0, 30.0, 60.0), (12.0, 40.0)


@pytest.mark.parametrize(
    "text",
    [
        "[12, 40, 30, 60]",
        "12,40,30,60",
        "(12,40),(30,60)",
        "(12, 40, 30, 60)",
        '{"bbox_2d": [12, 40, 30, 60], "label": "dog"}',
        '```json\n[{"bbox_2d": [12, 40, 30, 60], "label": "dog"}]\n```',
        "{'bbox': [12.0, 40, 30, 60]}",
        "<box>(12,40),(30,60)</box>",
        "<box>[[12, 40, 30, 60]]</box>",
        "<box>12 40 30 60</box>",
        r"\boxed{[12, 40, 30, 60]}",
        r"So \boxed{12, 40, 30, 60}.",
        "<think>Not [1, 2, 3, 4].</think><answer>[12, 40, 30, 60]</answer>",
        '<answer>```json\n{"bbox_2d": [12, 40, 30, 60]}\n```</answer>',
        "<answer>[1,2,3,4]</answer> no: <answer>[12, 40, 30, 60]</answer>",
        r"\boxed{1,2,3,4} no: \boxed{12,40,30,60}",
        "The box is [12, 40,\n 30, 60].",
        "\uff3b12\uff0c40\uff0c30\uff0c60\uff3d",
        "\uff0812\uff0c 40\uff09\uff0c\uff0830\uff0c60\uff09",
        "\u301012\u300140\u300130\u300160\u3011",
        "\uff11\uff12\uff0c40\uff0c30\uff0c60",
        "[12\uff0c40\uff0c\u300030\uff0c60]",
    ],
)
def test_one_box(text: str) -> None:
    assert read_answer(text, points=False, most=8).places == (BOX,)


@pytest.mark.parametrize(
    "text",
    [
        "(12, 40)",
        "12,40",
        "[12, 40]",
        '{"point_2d": [12, 40], "label": "ok"}',
        "<point>12 40</point>",
        "<point>(12, 40)</point>",
        "<answer>[{'action': 'click', 'point': [12, 40], 'input_text': 'no input text'}]</answer>",
    ],
)
@pytest.mark.parametrize("points", [True, False])
def test_one_point(text: str, points: bool) -> None:
    assert read_answer(text, points=points, most=8).places == (POINT,)


def test_several() -> None:
    text = '[{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [12, 40, 30, 60]}]'
    assert read_answer(text, points=False, most=8).places == ((1, 2, 3, 4), BOX)
    assert read_answer("(1,2),(3,4)", points=True, most=8).places == ((1, 2), (3, 4))
    assert len(read_answer("[1,2,3,4]" * 99, points=False, most=8).places) == 9


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[nan, 1, 2, 3]",
        "[1e5, 1, 2, 3]",
        "[1, 2, 3]",
        "[1, 2, 3, 4, 5]",
        "[" + "9" * 30 + ", 1, 2, 3]",
        "[__import__('os'), 1, 2, 3]",
        "the red one",
        "12, 40, 30, 60 or so",
    ],
)
def test_no_place(text: str) -> None:
    assert read_answer(text, points=False, most=8).places == ()


def test_an_answer_may_say_that_there_is_none() -> None:
    assert read_answer("<answer>[ ]</answer>", points=False, most=8).says_none
    assert read_answer("None.", points=False, most=8).says_none
    assert not read_answer("", points=False, most=8).says_none
    assert not read_answer("[12, 40, 30, 60]", points=False, most=8).says_none


@pytest.mark.parametrize("piece", ["[1, ", "(1,2),", "\\boxed{", "```", "<box>", " ", "1", '"bbox":[', "<answer>", "-"])
def test_floods_are_read_in_linear_time(piece: str) -> None:
    started = perf_counter()
    read_answer(piece * (100_000 // len(piece)), points=False, most=64)
    assert perf_counter() - started < 2  # some 0.05 s where nothing else runs
