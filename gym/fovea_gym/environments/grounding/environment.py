"""Boxes and points on a picture, from rows in files: referring expressions, detection, clicks on screenshots.

    reading.read_answer      the places of a response, in the coordinates of the model
    coordinates.frame_of     the width and height that these coordinates have on this picture
    grade.grade              places against true places, both in shares of the picture

True places stay in the units of the row until a grade needs the size of their picture, so that listing tasks opens no
image. Actions on screenshots are as in GUI-R1: a type, a point for a click, and a text for typing and scrolling.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fovea_gym.environments.base import Split
from fovea_gym.environments.dataset_prompts import bad_row, never_right
from fovea_gym.environments.dataset_tasks import FileTasks, Row
from fovea_gym.environments.grounding.coordinates import Frame, Pictures, as_json, frame_of, in_frame
from fovea_gym.environments.grounding.geometry import centre
from fovea_gym.environments.grounding.grade import MOST_PLACES, Placed, Rule, grade, in_shares, is_box, is_point
from fovea_gym.environments.grounding.reading import Numbers
from fovea_gym.environments.grounding.truth import as_text, from_text, places_of
from fovea_gym.graders.base import Grader
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.rows import Rows
from fovea_gym.settings.grounding import GroundingEnvironment
from fovea_gym.types import AnswerEnd, ImageRef, Message, Score, Task, Turn

_PICTURE = "fovea_picture"
"""Key of a task's row for its first picture, also when evaluation shows another picture in its place, as a control."""
_HISTORY = "history"
"""Column of GUI-R1 with the actions before a screenshot."""
_ACTION = re.compile(r"[\"']action[\"']\s{0,9}:\s{0,9}[\"']([\w /-]{1,40})[\"']")
_TEXT = re.compile(r"[\"']input_text[\"']\s{0,9}:\s{0,9}(?:\"([^\"\n]{0,2000})\"|'([^'\n]{0,2000})')")
_CLICK = "click"
_WITH_TEXT = ("type", "select", "scroll")
"""Actions whose text must also be right."""
_RIGHT_F1 = 0.5
"""Smallest F1 of the words with which a text is right, as in GUI-R1."""


class Grounding(FileTasks):
    """The environment `grounding`, whose settings are `GroundingEnvironment`."""

    def __init__(self, config: GroundingEnvironment, access: RowAccess, pictures: Pictures) -> None:
        self._config = config.with_layout
        self._rule = rule_of(self._config)
        self._pictures = pictures
        super().__init__(self._config, access, read_answer=self._read_truth)
        if self._config.answer_tags:
            self.answer_end = AnswerEnd(closing="</answer>", after="</think>" if self._config.think_tags else "")
        self.graders: tuple[Grader, ...] = (GroundingGrader(self._config, self._rule, pictures),)

    def prompt(self, task: Task) -> Sequence[Message]:
        """The messages of a prompt; BadRowError if a true place of the row is not on its picture."""
        self._check_truth(task)
        past = task.row.get(_HISTORY) if self._config.layout == "gui_r1" else None
        if isinstance(past, str) and past not in ("", "None"):
            task = replace(task, question=f"{task.question}\nEarlier actions: {past}")
        return super().prompt(task)

    def target(self, task: Task) -> str:
        """The true places, in the coordinates of the model."""
        frame = frame_of(self._config.coordinates, task.images[0], self._pictures)
        places = [self._asked(place) for place in truth_of(task, self._config, self._pictures)]
        written = [in_frame(place, frame) for place in places]
        if self._config.action_key is not None:
            name, text = action_of(task.row, self._config)
            answer = as_action(name, written[0] if name == _CLICK else None, text)
        else:
            answer = as_json(written, several=not self._rule.single)
        answer = f"<answer>{answer}</answer>" if self._config.answer_tags else answer
        return f"<think>I look for it.</think>{answer}" if self._config.think_tags else answer

    def _task(self, split: Split, rows: Rows, index: int, kind: str) -> Task:
        task = super()._task(split, rows, index, kind)
        return replace(task, row={**task.row, _PICTURE: task.images[0]}) if task.images else task

    def _asked(self, place: Numbers) -> Numbers:
        if not self._rule.points or len(place) == 2:
            return place
        left, top, right, bottom = place
        return centre((left, top, right, bottom))

    def _answer_cell(self, row: Row, key: str, where: str) -> object:
        if self._config.action_key is not None and action_of(row, self._config)[0] != _CLICK:
            return []
        return super()._answer_cell(row, key, where)

    def _read_truth(self, cell: object, where: str) -> str:
        rule, config = self._rule, self._config
        try:
            places = places_of(cell, where, form=config.box_form or "xyxy", points=rule.points)
        except RecursionError:
            raise bad_row(where, "the true place is nested too deeply", "answer_kind") from None
        # actions other than clicks have no place
        if rule.single and len(places) != 1 and (places or config.action_key is None):
            problem = f"it has {len(places)} true places, but {self._section}ask={rule.ask} asks for one"
            raise bad_row(where, problem, "answer_kind")
        if len(places) > MOST_PLACES:
            raise bad_row(where, f"it has {len(places)} true places, above the limit of {MOST_PLACES}", "answer_kind")
        if not rule.points and any(len(place) == 2 for place in places):
            ask = f"{self._section}ask"
            problem = f"a true place is a point, but {ask}={rule.ask} is for boxes; set {ask}=point"
            raise bad_row(where, problem, "answer_kind")
        return as_text(places)

    def _check_truth(self, task: Task) -> None:
        if not task.images:
            raise bad_row(task.id, "it has no image to find a place on", "image_absent")
        places = truth_of(task, self._config, self._pictures)
        is_missing = not places and action_of(task.row, self._config)[0] == _CLICK
        if is_missing or not all(is_box(place) or is_point(place) for place in places):
            raise never_right(task.answer, task.images[0].where)


class GroundingGrader:
    """The grader of `grounding`."""

    def __init__(self, config: GroundingEnvironment, rule: Rule, pictures: Pictures) -> None:
        self._config = config
        self._rule = rule
        self._pictures = pictures

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        frame = frame_of(self._config.coordinates, task.images[0], self._pictures)
        truth = truth_of(task, self._config, self._pictures)
        placed = grade(turns[-1].text, truth, frame, self._rule)
        if self._config.action_key is not None:
            placed = self._with_action(placed, task)
        return Score(
            reward=placed.reward(self._rule), accuracy=placed.accuracy, parts=placed.parts, marks=placed.marks(truth)
        )

    def _with_action(self, placed: Placed, task: Task) -> Placed:
        """The grade of an action: its type must be right, and its point or text."""
        name, text = action_of(task.row, self._config)
        given = action_in(placed.answer.region)
        is_right = given.name == name
        parts = {**placed.parts, "action": float(is_right), "format": float(given.name != "")}
        if name == _CLICK:
            return replace(placed, quality=is_right * placed.quality, accuracy=is_right * placed.accuracy, parts=parts)
        if name in _WITH_TEXT:
            parts["text"] = word_f1(given.text, text)
            is_right = is_right and parts["text"] >= _RIGHT_F1
        return replace(placed, quality=float(is_right), accuracy=float(is_right), parts=parts)


def rule_of(config: GroundingEnvironment) -> Rule:
    """The rule by which answers are graded."""
    return Rule(
        ask=config.asked,
        reward=config.rewarded,
        min_iou=config.min_iou,
        format_weight=config.format_weight,
        think_tags=config.think_tags,
        answer_tags=config.answer_tags,
    )


def truth_of(task: Task, config: GroundingEnvironment, pictures: Pictures) -> list[Numbers]:
    """The true places of a task, in shares of its first picture."""
    picture = task.row[_PICTURE]
    assert isinstance(picture, ImageRef), type(picture)
    frame: Frame = frame_of(config.truth_units or "original", picture, pictures)
    return [in_shares(place, frame) for place in from_text(task.answer)]


def action_of(row: Row, config: GroundingEnvironment) -> tuple[str, str]:
    """The true action of a row and its text."""
    name, text = row.get(config.action_key or ""), row.get(config.text_key or "")
    return str(name or "").strip().lower(), "" if text is None else str(text)


class Action(NamedTuple):
    """The action that an answer names."""

    name: str
    text: str


def action_in(region: str) -> Action:
    """The last action of an answer, with the text after it; empty if the answer names no action."""
    found = list(_ACTION.finditer(region))
    if not found:
        return Action("", "")
    text = _TEXT.search(region, found[-1].start())
    return Action(found[-1][1].strip().lower(), next((part for part in text.groups() if part), "") if text else "")


def as_action(name: str, point: Numbers | None, text: str) -> str:
    """An action in the format of GUI-R1's answers."""
    place = [-100, -100] if point is None else list(map(int, point))
    return str([{"action": name, "point": place, "input_text": text}])


def word_f1(text: str, truth: str) -> float:
    """F1 of the words of two texts, ignoring case."""
    ours, theirs = Counter(text.lower().split()), Counter(truth.lower().split())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())
