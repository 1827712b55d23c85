"""Long answers of a model are read in linear time: every parser and grader, 66 fills in 8 places each.

A pattern that begins anew at every blank takes 0.6 s for 20,000 of them, and a minute for 200,000.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product

import pytest

from fovea_gym.adapters import gymnasium, openenv
from fovea_gym.environments.answer_end import find_answer_end
from fovea_gym.environments.grounding.environment import action_in
from fovea_gym.environments.grounding.grade import Rule
from fovea_gym.environments.grounding.grade import grade as grade_places
from fovea_gym.examples.games.description import description_f1
from fovea_gym.examples.games.environment import FrozenLakeEnvironment, actions_in
from fovea_gym.examples.pages.environment import click_in
from fovea_gym.graders.base import TryAgainError
from fovea_gym.graders.by_name import grader_of
from fovea_gym.graders.judge import parsed_score
from fovea_gym.tools.base import ToolError
from fovea_gym.tools.calculator import computed
from fovea_gym.tools.calls.gemma_calls import GemmaCalls
from fovea_gym.tools.calls.json_calls import JsonCalls
from fovea_gym.tools.calls.xml_calls import XmlCalls
from fovea_gym.types import AnswerEnd, ToolSpec
from gym_tests.grading import within_a_second

NUM_CHARS = 60_000
"""Linear readers take some hundredths of a second for so many, quadratic ones three to twenty seconds."""
FILLS = [
    *(" ", "\n", "\t", "\r\n", "\u00a0", "a", "A", "1", "-", "+", ".", ",", ":", ";", "!", "'", '"', "`", "*", "_"),
    *("#", "=", "<", ">", "|", "/", "\\", "&", "%", "$", "(", ")", "[", "]", "{", "}", "()", "[]", "{}", "1,", "1."),
    *("a b ", "a, ", "the ", "no, ", "is ", "one ", "(1, 2), ", "[1,2,3,4],", '"box": [', "\\frac{", "\\boxed{", "```"),
    *("x:", "<think>", "</think> ", "<answer>", "</answer>", "<action>", "<tool_call>", "<function=f>"),
    *("\n<parameter=x>", "</parameter>\n", "</function>", "<|tool_call>", '<|"|>'),
]
PLACES = [
    *("{}", "It is {} 3.", "The answer is{}.", "\\boxed{{{}}}", "<think>a</think><answer>{}</answer>"),
    "<tool_call><function=f>{}</function></tool_call>",
    "<tool_call><function=f><parameter=x>1{}</parameter></function></tool_call>",
    "<|tool_call>call:f{{x:{}}}<tool_call|> <action>{}</action>",
]
AREA = ToolSpec(name="f", description="", parameters={"properties": {"x": {"type": "number"}}})
BOARD = ["@$.", "..*"]
GAME = FrozenLakeEnvironment(name="frozen_lake", think=True)
BOX = Rule(ask="box", reward="iou", think_tags=True, answer_tags=True)
PARSERS: dict[str, Callable[[str], object]] = {
    "calls as JSON": lambda text: JsonCalls().parse(text, [AREA]),
    "calls as XML": lambda text: XmlCalls().parse(text, [AREA]),
    "calls of Gemma": lambda text: GemmaCalls().parse(text, [AREA]),
    "actions of gymnasium": lambda text: gymnasium.action_in(text, ["up", "go left"]),
    "actions of OpenEnv": lambda text: openenv.action_in(text, None),
    "actions on screens": action_in,
    "moves": lambda text: actions_in(text, GAME),
    "boards in words": lambda text: description_f1(f"<observation>{text}</observation>", BOARD, BOARD),
    "clicks": lambda text: click_in(text, 1000),
    "calculations": computed,
    "ends of boxes": lambda text: find_answer_end(text, AnswerEnd()),
    "ends of tags": lambda text: find_answer_end(text, AnswerEnd(closing="</answer>", after="</think>")),
    "scores of a judge": parsed_score,
}
GRADERS: dict[str, Callable[[str], object]] = {
    "geo3k": lambda text: grader_of("geo3k", [])(text, {"truth": r"\frac{1}{2}"}, "row"),
    "vqa": lambda text: grader_of("vqa", [])(text, {"truth": ["two red cars", "yes"]}, "row"),
    "choices": lambda text: grader_of("vqa", [])(text, {"truth": "B", "options": ["red", "a blue car"]}, "row"),
    "shapes": lambda text: grader_of("shapes", [])(text, {"truth": "3"}, "row"),
    "grounding": lambda text: grade_places(text, [(0.1, 0.2, 0.3, 0.4)], (1000.0, 1000.0), BOX),
    "geospot": lambda text: grader_of("geospot", [])(text, {"truth": {"country": "France", "city": "Paris"}}, "row"),
}


READERS = [*PARSERS.items(), *(pytest.param(name, read, marks=pytest.mark.slow) for name, read in GRADERS.items())]


@pytest.mark.parametrize(("name", "read"), READERS)
def test_what_reads_or_grades_a_long_text_takes_linear_time(name: str, read: Callable[[str], object]) -> None:
    assert (len(FILLS), len(PLACES)) == (66, 8)
    for place, fill in product(PLACES, FILLS):
        part = fill * (NUM_CHARS // len(fill))
        with suppress(ToolError, TryAgainError):  # no calculation, no score
            within_a_second(partial(read, place.format(part, part)))
